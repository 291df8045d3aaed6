"""Whose the bytes are that a rank holds over time, from a trace that has measured them."""

from collections import defaultdict

from shardwise.trace.events import Trace
from shardwise.trace.memory import Curve


def held_by_owner(trace: Trace) -> dict[tuple[int, str], Curve]:
    """For each rank and owner, the bytes over time, each from its first change on."""
    changes: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for rank, owner, time, num_bytes in trace.holdings:
        changes[rank, owner].append((time, num_bytes))
    curves = {}
    for key, mine in sorted(changes.items(), key=lambda item: item[0][0]):
        held = 0.0
        curve: list[tuple[float, float]] = []
        for time, change in sorted(mine):
            held += change
            if curve and curve[-1][0] == time:
                curve.pop()
            curve.append((time, held))
        curves[key] = tuple(curve)
    return curves


def peak_by_owner(trace: Trace) -> tuple[dict[str, float], ...]:
    """For each rank, what each owner holds at the moment in which the rank holds most."""
    changes: list[list[tuple[float, str, float]]] = [[] for _ in range(trace.num_ranks)]
    for rank, owner, time, num_bytes in trace.holdings:
        changes[rank].append((time, owner, num_bytes))
    peaks = []
    for mine in changes:
        held: dict[str, float] = {owner: 0.0 for _, owner, _ in mine}
        fullest = dict(held)
        ordered = sorted(mine, key=lambda change: change[0])
        for place, (time, owner, num_bytes) in enumerate(ordered):
            held[owner] += num_bytes
            is_last_of_moment = place + 1 == len(ordered) or ordered[place + 1][0] != time
            if is_last_of_moment and sum(held.values()) > sum(fullest.values()):
                fullest = dict(held)
        peaks.append(fullest)
    return tuple(peaks)
