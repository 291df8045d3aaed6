"""Offloads saved activations and reloads them: memory for the price of the link to the host.

    0F0 0OFFLOAD0 0F1 ... 0F6 0RELOAD0 0B5 0B0

An offload stands directly behind the forward that saved the values. A reload is issued a few computations before its
backward, so that the bytes are back in time.
"""

from collections.abc import Callable

from shardwise.schedule.instruction import BACKWARD, COMPUTE, Instruction, Kind
from shardwise.schedule.schedule import Schedule


def insert_offloads(
    schedule: Schedule, *, which: Callable[[Instruction], bool], lead: int = 1, only_apart: bool = True
) -> Schedule:
    """Return the schedule with the activations of the forwards that `which` picks offloaded.

    Each is reloaded `lead` computations before its backward. With `only_apart`, one that would come back before
    anything was computed stays where it is. Without, it goes too, and is reloaded directly before its backward: what a
    forward of many layers saves first can leave while it goes on.
    """
    return schedule.with_orders([_with_offloads(order, which, lead, only_apart) for order in schedule.orders])


def _with_offloads(
    order: tuple[Instruction, ...], which: Callable[[Instruction], bool], lead: int, only_apart: bool
) -> list[Instruction]:
    computations = [position for position, instruction in enumerate(order) if instruction.kind in COMPUTE]
    number_of = {position: number for number, position in enumerate(computations)}
    forward_at: dict[tuple[int, int], int] = {}
    before: dict[int, list[Instruction]] = {}
    behind: dict[int, list[Instruction]] = {}
    for position in computations:
        for part in order[position].parts:
            if part.kind is Kind.F and which(part):
                forward_at[part.stage, part.microbatch] = position
            start = forward_at.get((part.stage, part.microbatch))
            if part.kind not in BACKWARD or start is None:
                continue
            back = max(0, number_of[position] - lead)
            is_apart = back > number_of[start] + 1
            if not only_apart:
                back = max(back, number_of[start] + 1)
            # With nothing computed in between, the bytes of a forward as a whole would leave and come back for nothing.
            if is_apart or not only_apart:
                behind.setdefault(start, []).append(Instruction(Kind.OFFLOAD, part.stage, part.microbatch))
                before.setdefault(computations[back], []).append(Instruction(Kind.RELOAD, part.stage, part.microbatch))
    out: list[Instruction] = []
    for position, instruction in enumerate(order):
        out += [*before.get(position, ()), instruction, *behind.get(position, ())]
    return out
