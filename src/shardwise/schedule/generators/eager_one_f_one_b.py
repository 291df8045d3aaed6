"""Eager 1F1B: twice the head start of 1F1B, so that the time of a hop is paid once and not for each microbatch.

In 1F1B a forward is sent just when it is needed: every microbatch pays the hop there and the hop back. A rank that is
two microbatches ahead for each rank below has the next input lying there already, at the price of holding it.

    shardwise schedule eager-1f1b --stages 3 --microbatches 5

    rank 0  F0 F1 F2 F3 F4 .  .  B0--- .  B1--- .  B2--- .  B3--- .  B4---
    rank 1  .  F0 F1 F2 .  B0--- F3 B1--- F4 B2--- .  B3--- .  B4--- .  .
    rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- .  .  .  .
"""

from shardwise.schedule.generators.one_f_one_b import alternate
from shardwise.schedule.placement import loop
from shardwise.schedule.schedule import Schedule


def eager_one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    orders = [alternate(rank, num_microbatches, num_ahead=2 * (num_ranks - 1 - rank)) for rank in range(num_ranks)]
    return Schedule.of("eager-1f1b", loop(num_ranks), num_microbatches, orders)
