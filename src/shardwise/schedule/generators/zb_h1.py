"""ZB-H1: the order of 1F1B with the backward split, so that weight gradients fill a part of the bubble.

Only the input gradient holds up the ranks above. A rank puts off its weight gradients by as many microbatches as there
are ranks above it: then every rank holds what rank 0 of 1F1B holds, and the pipe empties sooner.

    shardwise schedule zb-h1 --stages 3 --microbatches 5

    rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
"""

from shardwise.schedule.generators.one_f_one_b import alternate
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.placement import loop
from shardwise.schedule.schedule import Schedule


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    orders = [
        split_backward(alternate(rank, num_microbatches, num_ahead=num_ranks - 1 - rank), lag=rank)
        for rank in range(num_ranks)
    ]
    return Schedule.of("zb-h1", loop(num_ranks), num_microbatches, orders)


def split_backward(order: list[Instruction], *, lag: int) -> list[Instruction]:
    """Replace each backward by its input gradient, followed by the weight gradient of `lag` backwards ago."""
    out: list[Instruction] = []
    pending: list[Instruction] = []
    for instruction in order:
        if instruction.kind is not Kind.B:
            out.append(instruction)
            continue
        out.append(instruction._replace(kind=Kind.I))
        pending.append(instruction._replace(kind=Kind.W))
        if len(pending) > lag:
            out.append(pending.pop(0))
    return out + pending
