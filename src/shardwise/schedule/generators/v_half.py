"""V-Half: half the activations of 1F1B, for about half its bubble."""

from shardwise.schedule.generators.building_block import repeat_block
from shardwise.schedule.schedule import Schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    return repeat_block("v-half", num_ranks, num_microbatches, _block)


def _block(rank: int, num_ranks: int) -> tuple[int, int, int, int]:
    # Forwards go down two slots a rank and come up one: the next microbatch fits between. An even number of ranks
    # would put two things into one slot, three slots later it does not.
    gap = 0 if num_ranks % 2 else 3
    return (
        2 * rank,
        3 * num_ranks - rank - 2,
        3 * num_ranks + gap + 2 * rank - 1,
        6 * num_ranks + gap - rank - 2,
    )
