"""1F1B: one forward, one backward. Activations are bounded by the depth of the pipe, not by the microbatches.

The bubble is that of GPipe; what a rank holds is not.

    shardwise schedule 1f1b --stages 3 --microbatches 4

    rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
    rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
    rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
"""

from shardwise.schedule.instruction import Instruction, backward, forward
from shardwise.schedule.placement import loop
from shardwise.schedule.schedule import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    # A rank may run ahead only as far as the pipe below it is deep. Anything more is held as activations and starts no
    # backward sooner.
    orders = [alternate(rank, num_microbatches, num_ahead=num_ranks - 1 - rank) for rank in range(num_ranks)]
    return Schedule.of("1f1b", loop(num_ranks), num_microbatches, orders)


def alternate(stage: int, num_microbatches: int, *, num_ahead: int) -> list[Instruction]:
    """Return `num_ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    num_ahead = min(num_ahead, num_microbatches)
    order = [forward(stage, microbatch) for microbatch in range(num_ahead)]
    for microbatch in range(num_microbatches):
        if microbatch + num_ahead < num_microbatches:
            order.append(forward(stage, microbatch + num_ahead))
        order.append(backward(stage, microbatch))
    return order
