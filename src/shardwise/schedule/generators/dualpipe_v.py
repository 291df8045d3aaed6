"""DualPipeV: two chunks a rank as a V, with a forward of one overlapping a backward of the other all the time.

The pair is one unit: it exists so that the communication inside one half (of experts, say) hides behind the
computation of the other. Where a pair takes as long as its halves one after the other, ZB-V is no slower.

    shardwise schedule dualpipe-v --stages 2 --microbatches 4

    rank 0  F0 F1 F2 f0 i0 w0 f1 F3b1---- .  f2B0---- b2--- .  f3B1---- b3--- I2 W2 I3 W3
    rank 1  .  F0 f0 F1 f1 F2 b0--- f2B0---- F3b1---- f3B1---- b2--- B2--- .  i3 I3 w3 W3
"""

from shardwise.schedule.generators.writer import Writer
from shardwise.schedule.instruction import Instruction
from shardwise.schedule.placement import vee
from shardwise.schedule.schedule import Schedule


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    placement = vee(num_ranks)
    orders = [
        two_way(Writer(placement, num_microbatches), rank, num_ranks, placement.stages[rank], num_microbatches)
        for rank in range(num_ranks)
    ]
    return Schedule.of("dualpipe-v", placement, num_microbatches, orders)


def two_way(write: Writer, depth: int, num_depths: int, stages: tuple[int, ...], num_each: int) -> list[Instruction]:
    """Write the order of a rank `depth` below the end where microbatches enter, the turn being at `num_depths`.

    `stages` are the one met on the way down and the one on the way up; `num_each` microbatches go through both.
    """
    down, up = stages
    below = num_depths - 1 - depth
    for _ in range(2 * below):
        write.forward(down)
    for _ in range(depth + 1):
        write.forward(down)
        write.forward(up)
    for _ in range(below):
        write.input_gradient(up)
        write.weight_gradient()
        write.forward(up)
    for turn in range(num_each - 2 * num_depths + depth + 1):
        if turn == 0 and below == 0:
            # At the turn nothing else is ready yet: one after the other lets the first result go sooner.
            write.forward(down)
            write.backward(up)
        else:
            write.pair(ahead=down, back=up)
        write.pair(ahead=up, back=down)
    for _ in range(below):
        write.backward(up)
        write.pair(ahead=up, back=down)
    # The pipe empties. From the middle on, weight gradients are put off until nothing else is left to do.
    for position in range(2 * (depth + 1)):
        stage = down if position % 2 else up
        if position > depth:
            write.input_gradient(stage)
        else:
            write.backward(stage)
    for _ in range(below):
        write.weight_gradient()
        write.input_gradient(down)
    write.weight_gradients_left()
    return write.order
