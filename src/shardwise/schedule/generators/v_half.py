"""V-Half: half the activations of 1F1B, for about half its bubble.

Activations of the lower chunk live about as long as those of two ranks of 1F1B, for each rank alike.

    shardwise schedule v-half --stages 3 --microbatches 5

    time 0 to 9
    rank 0  F0 F1 F2 .  .  f0 i0 w0 f1 i1 w1 .  I0 W0 F3 f2 i2 w2
    rank 1  .  F0 F1 .  f0 .  f1 i0 w0 F2 .  I0 i1 w1 f2 W0 F3 I1
    rank 2  .  .  F0 f0 F1 f1 .  .  i0 w0 I0 W0 F2 f2 i1 w1 I1 W1

    time 9 to 17.5
    rank 0  I1 W1 F4 f3 i3 w3 I2 W2 .  f4 i4 I3 w4 W3 .  I4 W4
    rank 1  i2 w2 f3 W1 F4 I2 i3 w3 f4 W2 I3 i4 w4 W3 I4 W4 .
    rank 2  F3 f3 i2 I2 w2 F4 W2 f4 i3 I3 w3 W3 i4 I4 w4 W4 .
"""

from shardwise.schedule.generators.building_block import repeat_block
from shardwise.schedule.schedule import Schedule


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    return repeat_block("v-half", num_microbatches, [_slots(rank, num_ranks) for rank in range(num_ranks)])


def _slots(rank: int, num_ranks: int) -> tuple[int, int, int, int]:
    # Forwards go down two slots a rank and come up one: the next microbatch fits between. An even number of ranks
    # would put two things into one slot, three slots later it does not.
    gap = 0 if num_ranks % 2 else 3
    return 2 * rank, 3 * num_ranks - rank - 2, 3 * num_ranks + gap + 2 * rank - 1, 6 * num_ranks + gap - rank - 2
