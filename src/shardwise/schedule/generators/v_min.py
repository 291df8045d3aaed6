"""V-Min: a third of the activations of 1F1B, the least that a V can do with, and about its speed in practice.

It is the one of its family that suffers when F, I and W differ: there is no slack anywhere.

    shardwise schedule v-min --stages 3 --microbatches 5

    time 0 to 9
    rank 0  F0 F1 F2 .  .  f0 i0 w0 f1 .  .  I0 i1 w1 W0 f2 F3 I1
    rank 1  .  F0 F1 .  f0 .  f1 i0 w0 .  I0 F2 W0 i1 f2 w1 I1 F3
    rank 2  .  .  F0 f0 F1 f1 .  .  i0 I0 w0 W0 F2 f2 i1 I1 w1 W1

    time 9 to 17.5
    rank 0  i2 w2 W1 f3 F4 I2 i3 w3 W2 f4 i4 I3 w4 W3 .  I4 W4
    rank 1  W1 i2 f3 w2 I2 F4 W2 i3 f4 w3 I3 i4 w4 W3 I4 W4 .
    rank 2  F3 f3 i2 I2 w2 W2 F4 f4 i3 I3 w3 W3 i4 I4 w4 W4 .
"""

from shardwise.schedule.generators.building_block import repeat_block
from shardwise.schedule.schedule import Schedule


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    return repeat_block("v-min", num_microbatches, [_slots(rank, num_ranks) for rank in range(num_ranks)])


def _slots(rank: int, num_ranks: int) -> tuple[int, int, int, int]:
    # Everything goes down and up without a pause, so activations live as shortly as they can. A multiple of three
    # ranks would put two things into one slot, two slots later it does not.
    gap = 0 if num_ranks % 3 else 2
    return rank, 2 * num_ranks - rank - 1, 2 * num_ranks + gap + rank, 4 * num_ranks + gap - rank - 1
