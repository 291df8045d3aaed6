"""ZB-H2: as ZB-H1, with a head start of two forwards for each rank below, so that no rank ever waits.

Every rank is busy from its first forward to its last weight gradient, when F, I and W take the same time and there are
2p - 1 microbatches or more. It holds nearly twice what 1F1B holds.
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
