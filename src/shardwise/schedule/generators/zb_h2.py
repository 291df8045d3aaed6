"""ZB-H2: as ZB-H1, with a head start of two forwards for each rank below, so that no rank ever waits.

Every rank is busy from its first forward to its last weight gradient, when F, I and W take the same time and there are
2p - 1 microbatches or more. It holds nearly twice what 1F1B holds.

    shardwise schedule zb-h2 --stages 3 --microbatches 6

    rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
    rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
    rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
"""

from shardwise.schedule.generators.one_f_one_b import alternate
from shardwise.schedule.generators.zb_h1 import split_backward
from shardwise.schedule.placement import loop
from shardwise.schedule.schedule import Schedule


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    orders = [
        split_backward(alternate(rank, num_microbatches, num_ahead=2 * (num_ranks - 1 - rank)), lag=2 * rank)
        for rank in range(num_ranks)
    ]
    return Schedule.of("zb-h2", loop(num_ranks), num_microbatches, orders)
