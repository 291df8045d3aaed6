"""Insert offloads and reloads of saved activations: less device memory, for traffic on the link to the host.

    0F0 0OFFLOAD0 0F1 ... 0F6 0RELOAD0 0B5 0B0

An offload directly follows the forward that saved the values: values saved by the first layers can leave while the
forward continues. A reload is issued one computation before its backward, so that the bytes are back in time.
"""

from collections.abc import Callable

from shardwise.schedule.instruction import BACKWARD, COMPUTE, Instruction, Kind
from shardwise.schedule.schedule import Schedule


def insert_offloads(schedule: Schedule, which: Callable[[Instruction], bool] = lambda _: True) -> Schedule:
    """Return the schedule with the activations of the forwards that `which` picks offloaded."""
    return schedule.with_orders([_with_offloads(order, which) for order in schedule.orders])


def _with_offloads(order: tuple[Instruction, ...], which: Callable[[Instruction], bool]) -> list[Instruction]:
    computations = [position for position, instruction in enumerate(order) if instruction.kind in COMPUTE]
    forward_at: dict[tuple[int, int], int] = {}
    before: dict[int, list[Instruction]] = {}
    behind: dict[int, list[Instruction]] = {}
    for number, position in enumerate(computations):
        for part in order[position].parts:
            if part.kind is Kind.F and which(part):
                forward_at[part.stage, part.microbatch] = number
            start = forward_at.get((part.stage, part.microbatch))
            if part.kind in BACKWARD and start is not None:
                back = max(number - 1, start + 1)  # Nothing comes back before it has left.
                behind.setdefault(computations[start], []).append(part._replace(kind=Kind.OFFLOAD))
                before.setdefault(computations[back], []).append(part._replace(kind=Kind.RELOAD))
    out: list[Instruction] = []
    for position, instruction in enumerate(order):
        out += [*before.get(position, ()), instruction, *behind.get(position, ())]
    return out
