"""What each rank holds over time, read off the same events as the time.

All changes of one instant count as one: what an event frees at its end is there for the next one that starts then.
"""

from collections.abc import Iterable

from shardwise.trace.events import Event, Trace

#: Steps of a curve: (time, what is held from then on until the next).
Curve = tuple[tuple[float, float], ...]


def held_over_time(trace: Trace, rank: int) -> Curve:
    """What one rank holds, from its first allocation on, in the unit of the trace."""
    return _curve(_changes(event for event in trace.events if event.rank == rank))


def all_held_over_time(trace: Trace) -> tuple[Curve, ...]:
    """The curve of every rank, in one pass over the events and one sort for each rank."""
    return tuple(_curve(changes) for changes in _changes_of_ranks(trace))


def peaks(trace: Trace) -> tuple[float, ...]:
    """The most that each rank ever holds."""
    return tuple(max((held for _, held in _curve(changes)), default=0.0) for changes in _changes_of_ranks(trace))


def _changes_of_ranks(trace: Trace) -> list[list[tuple[float, float]]]:
    ranks: list[list[Event]] = [[] for _ in range(trace.num_ranks)]
    for event in trace.events:
        if event.held_at_start or event.held_at_end:
            ranks[event.rank].append(event)
    return [_changes(events) for events in ranks]


def _changes(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Each change of what is held, with its time, in order of time."""
    changes = []
    for event in events:
        if event.held_at_start:
            changes.append((event.start, event.held_at_start))
        if event.held_at_end:
            changes.append((event.end, event.held_at_end))
    changes.sort()
    return changes


def _curve(changes: list[tuple[float, float]]) -> Curve:
    """Sum the changes up, one step for each instant. An instant in which as much comes as goes is no step."""
    curve: list[tuple[float, float]] = []
    held = before = 0.0
    last = len(changes) - 1
    for index, (time, change) in enumerate(changes):
        held += change
        if index < last and changes[index + 1][0] == time:
            continue
        if held != before:
            curve.append((time, held))
            before = held
    return tuple(curve)
