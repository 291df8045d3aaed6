"""GPipe: all forwards, then all backwards. The simplest, and it holds every microbatch.

A rank waits while its last microbatch goes down the pipe and the first gradient comes back up.

    shardwise schedule gpipe --stages 3 --microbatches 4

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---
    rank 1  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .
    rank 2  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .
"""

from shardwise.schedule.instruction import backward, forward
from shardwise.schedule.placement import loop
from shardwise.schedule.schedule import Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    microbatches = range(num_microbatches)
    orders = [
        [forward(rank, microbatch) for microbatch in microbatches]
        + [backward(rank, microbatch) for microbatch in microbatches]
        for rank in range(num_ranks)
    ]
    return Schedule.of("gpipe", loop(num_ranks), num_microbatches, orders)
