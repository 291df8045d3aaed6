"""V-Min: a third of the activations of 1F1B, the least that a V can do with, and about its speed in practice."""

from shardwise.schedule.generators.building_block import repeat_block
from shardwise.schedule.schedule import Schedule


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    return repeat_block("v-min", num_ranks, num_microbatches, _block)


def _block(rank: int, num_ranks: int) -> tuple[int, int, int, int]:
    # Everything goes down and up without a pause, so activations live as shortly as they can. A multiple of three
    # ranks would put two things into one slot, two slots later it does not.
    gap = 0 if num_ranks % 3 else 2
    return rank, 2 * num_ranks - rank - 1, 2 * num_ranks + gap + rank, 4 * num_ranks + gap - rank - 1
