"""Joins input and weight gradients that follow each other to a full backward, and takes full backwards apart.

    1I0 1W0 1F1 1I1 1F2 1W1   <->   1B0 1F1 1I1 1F2 1W1

A full backward frees its activations at once and needs one pass over the graph; a split one lets the rank above start
sooner.
"""

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.schedule import Schedule


def merge_backward(schedule: Schedule) -> Schedule:
    """Return the schedule with each `I` that is directly followed by its `W` joined to a `B`."""
    return schedule.with_orders([_merged(order) for order in schedule.orders])


def split_backward(schedule: Schedule) -> Schedule:
    """Return the schedule with each `B`, alone or in a pair, taken apart into `I` and `W`; pairs become sequences."""
    return schedule.with_orders([_split(order) for order in schedule.orders])


def _merged(order: tuple[Instruction, ...]) -> list[Instruction]:
    out: list[Instruction] = []
    for instruction in order:
        before = out[-1] if out else None
        if before is not None and before.kind is Kind.I and instruction == before._replace(kind=Kind.W):
            out[-1] = before._replace(kind=Kind.B)
        else:
            out.append(instruction)
    return out


def _split(order: tuple[Instruction, ...]) -> list[Instruction]:
    out: list[Instruction] = []
    for instruction in order:
        for part in instruction.parts:
            if part.kind is Kind.B:
                out += [part._replace(kind=Kind.I), part._replace(kind=Kind.W)]
            else:
                out.append(part)
    return out
