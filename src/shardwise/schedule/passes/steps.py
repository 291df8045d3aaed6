"""Adds what ends a step: tied gradients meet, gradients are reduced, the weights take their step.

    0B7 0REDUCE0~0 0REDUCE0 0STEP0

Gradients that several stages share are summed over those stages first: only then is the sum reduced over replicas.
A reduction stands directly behind the last gradient that it needs, so that it runs beside what the rank still has to
do for its other chunks.
"""

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.schedule import Schedule


def insert_steps(schedule: Schedule, *, reduce_gradients: bool = False) -> Schedule:
    """Return the schedule with a STEP for each stage and step, and the reductions before it.

    Stages tied to others reduce over their tie; with `reduce_gradients` every stage also reduces over its replicas.
    Steps that the schedule has already (PipeDream-2BW places its own) stay where they are.
    """
    return schedule.with_orders([_with_steps(order, schedule, reduce_gradients) for order in schedule.orders])


def _with_steps(order: tuple[Instruction, ...], schedule: Schedule, reduce_gradients: bool) -> list[Instruction]:
    last_gradient = {
        (part.stage, schedule.step_of(part.microbatch)): position
        for position, instruction in enumerate(order)
        for part in instruction.parts
        if part.kind in (Kind.W, Kind.B)
    }
    has_steps = any(instruction.kind is Kind.STEP for instruction in order)
    behind: dict[int, list[Instruction]] = {}
    steps: list[Instruction] = []
    for (stage, step), position in last_gradient.items():
        ties = [number for number, tie in enumerate(schedule.placement.ties) if stage in tie]
        reductions = [Instruction(Kind.REDUCE, stage, step, tie) for tie in ties]
        if reduce_gradients:
            reductions.append(Instruction(Kind.REDUCE, stage, step))
        behind.setdefault(position, []).extend(reductions)
        if not has_steps:
            # The rank's other work comes first: a step that waits for its reduction would hold it up.
            where = len(order) - 1 if schedule.num_steps == 1 else position
            (steps if where == len(order) - 1 else behind[position]).append(Instruction(Kind.STEP, stage, step))
    out: list[Instruction] = []
    for position, instruction in enumerate(order):
        out.append(instruction)
        out.extend(behind.get(position, ()))
    return out + steps
