"""Hidden communication: bytes that moved while their receiver was computing."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from shardwise.trace.activities import COPIES, ActivityKind
from shardwise.trace.attribution import BESIDE
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.stretches import BUSY, Stretch, stretches


def hidden_of_ranks(trace: Trace, cut: Sequence[Sequence[Stretch]] | None = None) -> tuple[float, ...]:
    """Return, for each rank, the seconds in which it worked while data moved to it. `cut` are the trace's stretches.

    The arrival of a measured message is known only if its receiver waited for it. Other messages are assumed to take
    the median of those on their link, but no longer than until they were needed. If the activities of a GPU were
    recorded, its transfers are known.
    """
    work = [
        [(each.start, each.end) for each in rank if each.part in BUSY]
        for rank in (stretches(trace) if cut is None else cut)
    ]
    moving: list[list[tuple[float, float]]] = [[] for _ in range(trace.num_ranks)]
    for rank, start, end in _moving(trace):
        moving[rank].append((start, end))
    return tuple(overlap(mine, joined(moves)) for mine, moves in zip(work, moving, strict=True))


def _moving(trace: Trace) -> Iterator[tuple[int, float, float]]:
    seen = {each.rank for each in trace.activities}
    for activity in trace.activities:
        if activity.kind in COPIES or activity.kind is ActivityKind.NCCL:
            yield activity.rank, activity.start, activity.end
    for event in trace.events:
        if event.lane in BESIDE and event.rank not in seen:
            yield event.rank, event.start, event.end
        elif event.lane is Lane.SEND and event.peer is not None and not trace.is_measured:
            yield event.peer, event.start, event.end
    if trace.is_measured:
        yield from (each for each in _flights(trace) if each[0] not in seen)


def _flights(trace: Trace) -> Iterator[tuple[int, float, float]]:
    links: dict[tuple[int, int], list[tuple[Event, Event]]] = defaultdict(list)
    for event in trace.events:
        if event.lane is Lane.RECEIVE and event.after is not None:
            send = trace.events[event.after]
            links[send.rank, event.rank].append((send, event))
    for (_, target), transfers in links.items():
        stood = [receive.end - send.start for send, receive in transfers if receive.start <= send.start]
        usual = median(stood) if stood else 0.0
        for send, receive in transfers:
            yield target, send.start, min(receive.end, send.start + usual)


def joined(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlap(work: Sequence[tuple[float, float]], moves: Sequence[tuple[float, float]]) -> float:
    """Return how long work and moves overlapped, for each move separately. Work is in order, without overlaps."""
    starts = [start for start, _ in work]
    total = 0.0
    for start, end in moves:
        place = max(bisect_right(starts, start) - 1, 0)
        while place < len(work) and work[place][0] < end:
            total += max(0.0, min(end, work[place][1]) - max(start, work[place][0]))
            place += 1
    return total
