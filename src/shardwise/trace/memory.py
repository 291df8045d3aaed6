"""The memory that each rank holds over time, by owner, from the same trace as the times.

All changes at one instant count as one: memory that an event frees at its end is available to an event starting then.
"""

from collections import defaultdict
from collections.abc import Iterable

from shardwise.trace.events import Trace

#: Steps of a curve: (time, the amount held from then until the next).
Curve = tuple[tuple[float, float], ...]


def held_over_time(trace: Trace) -> tuple[Curve, ...]:
    """Return what every rank holds, from its first allocation on, in the unit of the trace."""
    ranks: list[list[tuple[float, float]]] = [[] for _ in range(trace.num_ranks)]
    for event in trace.events:
        if event.held_at_start:
            ranks[event.rank].append((event.start, event.held_at_start))
        if event.held_at_end:
            ranks[event.rank].append((event.end, event.held_at_end))
    return tuple(map(_curve, ranks))


def peaks(trace: Trace) -> tuple[float, ...]:
    """Return the peak of each rank."""
    return tuple(max((held for _, held in curve), default=0.0) for curve in held_over_time(trace))


def held_by_owner(trace: Trace) -> dict[tuple[int, str], Curve]:
    """Return the bytes over time for each rank and owner, if a trace has measured them."""
    changes: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for rank, owner, time, num_bytes in trace.holdings:
        changes[rank, owner].append((time, num_bytes))
    return {key: _sums(mine) for key, mine in sorted(changes.items(), key=lambda item: item[0][0])}


def peak_by_owner(trace: Trace) -> tuple[dict[str, float], ...]:
    """Return what each owner holds on each rank at the moment of the rank's peak."""
    moments: list[dict[float, list[tuple[str, float]]]] = [defaultdict(list) for _ in range(trace.num_ranks)]
    fullest: list[dict[str, float]] = [{} for _ in range(trace.num_ranks)]
    for rank, owner, time, num_bytes in trace.holdings:
        moments[rank][time].append((owner, num_bytes))
        fullest[rank][owner] = 0.0
    for rank, mine in enumerate(moments):
        held = dict(fullest[rank])
        for time in sorted(mine):
            for owner, num_bytes in mine[time]:
                held[owner] += num_bytes
            if sum(held.values()) > sum(fullest[rank].values()):
                fullest[rank] = dict(held)
    return tuple(fullest)


def _curve(changes: Iterable[tuple[float, float]]) -> Curve:
    """Return the sums after each instant that changes them."""
    sums = _sums(changes)
    return tuple(
        step for step, before in zip(sums, (0.0, *(held for _, held in sums)), strict=False) if step[1] != before
    )


def _sums(changes: Iterable[tuple[float, float]]) -> Curve:
    """Return the sum after each instant."""
    held = 0.0
    sums: dict[float, float] = {}
    for time, change in sorted(changes):
        held += change
        sums[time] = held
    return tuple(sums.items())
