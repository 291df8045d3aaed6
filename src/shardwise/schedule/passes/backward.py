"""Split full backwards into input and weight gradients.

    1B0 1F1 1I1 1F2 1W1   ->   1I0 1W0 1F1 1I1 1F2 1W1

A full backward frees its activations at once and needs one pass over the graph; a split one lets the rank above start
sooner.
"""

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.schedule import Schedule


def split_backward(schedule: Schedule) -> Schedule:
    """Return the schedule with each `B`, alone or in a pair, split into `I` and `W`; pairs become sequences."""
    return schedule.with_orders([_split(order) for order in schedule.orders])


def _split(order: tuple[Instruction, ...]) -> list[Instruction]:
    out: list[Instruction] = []
    for instruction in order:
        for part in instruction.parts:
            if part.kind is Kind.B:
                out += [part._replace(kind=Kind.I), part._replace(kind=Kind.W)]
            else:
                out.append(part)
    return out
