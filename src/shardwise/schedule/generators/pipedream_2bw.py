"""PipeDream-2BW: 1F1B that never empties the pipe between steps, with two versions of the weights.

While the last microbatches of one step go backward, the first of the next go forward with the weights that are there:
those of the step before. So weights are one step old, W(t+1) = W(t) - lr * g(W(t-1)), always exactly one, and two
versions are enough as long as a step has at least as many microbatches as there are ranks.

    shardwise schedule pipedream-2bw --stages 2 --microbatches 3

    rank 0  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6--- F8 B7--- .  B8---
    rank 1  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7--- F8 B8--- .  .
"""

from shardwise.schedule.generators.one_f_one_b import alternate
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.placement import loop
from shardwise.schedule.schedule import Schedule


def pipedream_2bw(num_ranks: int, num_microbatches: int, num_steps: int = 3) -> Schedule:
    orders = []
    for rank in range(num_ranks):
        order = []
        for instruction in alternate(rank, num_microbatches * num_steps, num_ahead=num_ranks - 1 - rank):
            order.append(instruction)
            step, last = divmod(instruction.microbatch + 1, num_microbatches)
            if instruction.kind is Kind.B and last == 0:
                order.append(Instruction(Kind.STEP, rank, step - 1))
        orders.append(order)
    return Schedule.of("pipedream-2bw", loop(num_ranks), num_microbatches, orders, num_steps=num_steps, staleness=1)
