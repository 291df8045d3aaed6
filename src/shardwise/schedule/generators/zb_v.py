"""ZB-V: two chunks a rank, laid out as a V, and no bubble with no more memory than 1F1B, when F, I and W are equal.

Rank r holds stages r and 2p - 1 - r, so the loss is on rank 0 and its backward starts where the pipe began.

    shardwise schedule zb-v --stages 3 --microbatches 5

    rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4 W4 .  .
    rank 1  .  F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 W3 w4 W4 .
    rank 2  .  .  F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 w3 W3 w4 W4
"""

from shardwise.schedule.generators.writer import Writer
from shardwise.schedule.instruction import Instruction
from shardwise.schedule.placement import Placement, vee
from shardwise.schedule.schedule import Schedule


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    placement = vee(num_ranks)
    orders = [_order(rank, placement, num_microbatches) for rank in range(num_ranks)]
    return Schedule.of("zb-v", placement, num_microbatches, orders)


def _order(rank: int, placement: Placement, num_microbatches: int) -> list[Instruction]:
    num_ranks = placement.num_ranks
    down, up = placement.stages[rank]
    # The pattern is whole with 2p - 1 microbatches; with fewer it is the same pattern with holes.
    num_rounds = max(num_microbatches, 2 * num_ranks - 1)
    write = Writer(placement, num_microbatches)
    for _ in range(2 * (num_ranks - rank) - 1):
        write.forward(down)
    for _ in range(rank):
        write.forward(up)
        write.forward(down)
    for _ in range(num_ranks - rank):
        _one_of_each(write, up)
    num_down, num_up = 2 * num_ranks - 1 - rank, num_ranks
    for turn in range(num_rounds - num_up):
        if turn < num_rounds - num_down:
            write.forward(down)
        write.input_gradient(down)
        write.weight_gradient(down)
        _one_of_each(write, up)
    # The pipe empties: input gradients first, since other ranks wait for them.
    for _ in range(rank):
        write.input_gradient(down)
        write.input_gradient(up)
    for _ in range(num_ranks - rank):
        write.input_gradient(down)
        write.weight_gradient(down)
    write.weight_gradients_left()
    return write.order


def _one_of_each(write: Writer, stage: int) -> None:
    write.forward(stage)
    write.input_gradient(stage)
    write.weight_gradient(stage)
