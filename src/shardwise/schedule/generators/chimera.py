"""Chimera: the model held twice, microbatches entering at both ends, each end half of them.

Count time in slots of one forward or one backward. Going down, microbatch j of a unit of p reaches rank r in slot
r + 2j, and its backward comes by in slot 2p - 1 - r + 2j; going up, ranks count from the other end. With an even number
of ranks no two of these fall into one slot, so the slots are the order. Units follow each other every 2p slots.

    shardwise schedule chimera --stages 4 --microbatches 4

    rank 0  F0 F2 .  f1 b1--- f3 b3--- .  B0--- .  .  B2---
    rank 1  .  F0 f1 F2 f3 .  b1--- B0--- b3--- B2--- .  .
    rank 2  .  f1 F0 f3 F2 .  B0--- b1--- B2--- b3--- .  .
    rank 3  f1 f3 .  F0 B0--- F2 B2--- .  b1--- .  .  b3---
"""

from shardwise.schedule.instruction import Instruction, backward, forward
from shardwise.schedule.placement import mirrored
from shardwise.schedule.schedule import Schedule


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    placement = mirrored(num_ranks)
    half = num_ranks // 2
    slots: list[list[tuple[int, Instruction]]] = [[] for _ in range(num_ranks)]
    for microbatch in range(num_microbatches):
        unit, position = divmod(microbatch // 2, half)
        start = 2 * (num_ranks * unit + position)
        for depth, stage in enumerate(placement.pipe(microbatch)):
            of_rank = slots[placement.ranks[stage]]
            of_rank.append((start + depth, forward(stage, microbatch)))
            of_rank.append((start + 2 * num_ranks - 1 - depth, backward(stage, microbatch)))
    orders = [[instruction for _, instruction in sorted(of_rank)] for of_rank in slots]
    return Schedule.of("chimera", placement, num_microbatches, orders)
