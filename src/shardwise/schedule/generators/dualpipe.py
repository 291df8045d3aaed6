"""DualPipe: the model held twice, microbatches entering at both ends, forwards overlapping backwards where they meet.

The order of a rank depends only on how far it is from its nearer end; that of DualPipeV is the same, folded in half.

    shardwise schedule dualpipe --stages 2 --microbatches 6

    rank 0  F0 f1 F2 b1--- f3B0---- F4b3---- f5B2---- b5--- I4 W4
    rank 1  f1 F0 f3 B0--- F2b1---- f5B2---- F4b3---- B4--- i5 w5
"""

from shardwise.schedule.generators.dualpipe_v import two_way
from shardwise.schedule.generators.writer import Writer
from shardwise.schedule.placement import mirrored
from shardwise.schedule.schedule import Schedule


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    placement = mirrored(num_ranks)
    half = num_ranks // 2
    orders = []
    for rank in range(num_ranks):
        first, second = placement.stages[rank]
        upper = rank < half
        stages = (first, second) if upper else (second, first)
        depth = rank if upper else num_ranks - 1 - rank
        orders.append(two_way(Writer(placement, num_microbatches), depth, half, stages, num_microbatches // 2))
    return Schedule.of("dualpipe", placement, num_microbatches, orders)
