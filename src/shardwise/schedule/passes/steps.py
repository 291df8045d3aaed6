"""Insert the end of a step: reductions of tied gradients, reductions over replicas, optimizer steps.

    0B7 0REDUCE0~0 0REDUCE0 0STEP0

Gradients that several stages share are summed over those stages first, and then reduced over replicas. A reduction
directly follows the last gradient of its rank that it needs, so that it overlaps with the rank's remaining work for
other chunks. Ties are reduced in one order on every rank: two ranks that share two ties and started with different
ones would deadlock.
"""

from shardwise.schedule.instruction import RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.schedule import Schedule


def insert_steps(schedule: Schedule, *, reduce_gradients: bool = False) -> Schedule:
    """Return the schedule with a STEP for each stage and step, and the reductions before it.

    Stages tied to others reduce over their tie; with `reduce_gradients` every stage also reduces over its replicas.
    Steps and reductions that the schedule has already (PipeDream-2BW places its steps) stay where they are.
    """
    return schedule.with_orders([_with_steps(order, schedule, reduce_gradients) for order in schedule.orders])


def _with_steps(order: tuple[Instruction, ...], schedule: Schedule, reduce_gradients: bool) -> list[Instruction]:
    last_gradient = {
        (part.stage, schedule.step_of(part.microbatch)): _behind_transfers(order, position)
        for position, instruction in enumerate(order)
        for part in instruction.parts
        if part.kind in (Kind.W, Kind.B)
    }
    has_steps = any(instruction.kind is Kind.STEP for instruction in order)
    behind: dict[int, list[Instruction]] = {}
    ready = _place_ties(last_gradient, schedule, behind)
    steps: list[Instruction] = []
    for (stage, step), position in last_gradient.items():
        complete = max(position, ready.get((stage, step), 0))
        if reduce_gradients:
            behind.setdefault(complete, []).append(Instruction(Kind.REDUCE, stage, step))
        if not has_steps:
            # Steps come last in a rank's list: a step that waits for its reduction would delay other work.
            last = steps if schedule.num_steps == 1 else behind.setdefault(complete, [])
            last.append(Instruction(Kind.STEP, stage, step))
    there_already = {instruction for instruction in order if instruction.kind is Kind.REDUCE}
    out: list[Instruction] = []
    for position, instruction in enumerate(order):
        out.append(instruction)
        out.extend(each for each in behind.get(position, ()) if each not in there_already)
    return out + steps


def _behind_transfers(order: tuple[Instruction, ...], position: int) -> int:
    """Return the position of the last transfer directly after an instruction: other ranks wait for transfers first."""
    while position + 1 < len(order) and order[position + 1].kind in SENDS | RECEIVES:
        position += 1
    return position


def _place_ties(
    last_gradient: dict[tuple[int, int], int], schedule: Schedule, behind: dict[int, list[Instruction]]
) -> dict[tuple[int, int], int]:
    """Put each tie's reductions after the last gradient that this rank contributes to it or to an earlier tie.

    Return, for each stage and step with ties, the position of the last reduction.
    """
    ready: dict[tuple[int, int], int] = {}
    for step in range(schedule.num_steps):
        position = 0
        for number, tie in enumerate(schedule.placement.ties):
            members = [stage for stage in tie if (stage, step) in last_gradient]
            position = max([position, *(last_gradient[stage, step] for stage in members)])
            for stage in members:
                behind.setdefault(position, []).append(Instruction(Kind.REDUCE, stage, step, number))
                ready[stage, step] = position
    return ready
