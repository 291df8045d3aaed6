"""Looped breadth-first: all microbatches through chunk 0, then all through chunk 1; backwards in reverse.

It holds as much as GPipe and fills as quickly as interleaved. Its point is that a chunk is used in one stretch: one
gather and one reduction for each chunk in a step, each with the time of a whole chunk to hide in.

    shardwise schedule looped-bfs --stages 2 --microbatches 4

    rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3---
    rank 1  .  F0 F1 F2 F3 f0 f1 f2 f3 b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3--- .  .
"""

from shardwise.schedule.instruction import backward, forward
from shardwise.schedule.placement import loop
from shardwise.schedule.schedule import Schedule


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        order = [forward(stage, microbatch) for stage in stages for microbatch in range(num_microbatches)]
        order += [backward(stage, microbatch) for stage in reversed(stages) for microbatch in range(num_microbatches)]
        orders.append(order)
    return Schedule.of("looped-bfs", loop(num_ranks, num_chunks), num_microbatches, orders)
