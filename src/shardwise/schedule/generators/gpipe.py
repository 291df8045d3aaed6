"""GPipe: all forwards, then all backwards. The simplest, and it holds every microbatch."""

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
