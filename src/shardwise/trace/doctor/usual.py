"""What instructions usually take: the median of those of one kind on one stage."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from shardwise.trace.events import Event

#: What instructions that are alike have in common: the letters of their parts, and their stage.
Alike = tuple[str, int]


def alike(event: Event) -> Alike:
    """What an instruction is like."""
    return "".join(_letter(part) for part in event.name.split("&")), event.stage


def medians(events: Sequence[Event]) -> dict[Alike, float]:
    """The usual time of each kind of instruction."""
    found: dict[Alike, list[float]] = defaultdict(list)
    for event in events:
        found[alike(event)].append(event.seconds)
    return {key: median(values) for key, values in found.items()}


def usual_busy(events: Sequence[Event]) -> float:
    """What a rank would compute for if nothing stalled."""
    usual = medians(events)
    return sum(usual[alike(event)] for event in events)


def least_busy(events: Sequence[Event]) -> float:
    """What a rank would compute for if all instructions of a kind were as quick as the quickest quarter of them.

    What else a machine has to do makes some instructions longer, and a slow device all of them.
    """
    found: dict[Alike, list[float]] = defaultdict(list)
    for event in events:
        found[alike(event)].append(event.seconds)
    return sum(len(values) * sorted(values)[(len(values) - 1) // 4] for values in found.values())


def _letter(name: str) -> str:
    return next((each for each in name if not each.isdecimal()), "?")
