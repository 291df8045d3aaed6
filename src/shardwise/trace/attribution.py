"""Where the time went: for every moment in which a rank does not compute, why, and on whose account.

    rank 0  F0 F1 .  .  B0--- .  B1---      waiting for rank 1's B0, then for its B1
    rank 1  .  F0 B0--- F1 B1--- .  .       warm-up, and at the end cool-down

The simulator and the runtime note in `Event.after` what let each event start. Read backwards from the end of a gap
that is the whole explanation; nothing is guessed from the times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shardwise.trace.events import Event, Lane, Trace


class Cause(StrEnum):
    """Why a rank does not compute."""

    WARM_UP = "warm-up"  # Before its first computation: the pipe is still filling.
    COOL_DOWN = "cool-down"  # After its last: the pipe is emptying.
    WAITING = "waiting"  # For another rank's computation.
    TRANSFER = "transfer"  # The data that it waits for is in transit: exposed communication.
    COLLECTIVE = "collective"  # It waits for a gather, a reduction, or activations in transit from or to the device.


#: Causes with bytes in transit.
EXPOSED = frozenset({Cause.TRANSFER, Cause.COLLECTIVE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """An idle period of a rank. `on` names the event that it waits for and `on_rank` that event's rank, if known."""

    rank: int
    start: float
    end: float
    cause: Cause
    on_rank: int | None = None
    on: str | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


BESIDE = frozenset({Lane.COLLECTIVE, Lane.OFFLOAD, Lane.RELOAD})
_CAUSES = {Lane.SEND: Cause.TRANSFER, **dict.fromkeys(BESIDE, Cause.COLLECTIVE)}


def gaps(trace: Trace) -> tuple[tuple[Gap, ...], ...]:
    """Return the idle time of every rank between the start and the end of the trace, in order.

    It takes two passes over the events, however many ranks there are.
    """
    beside: list[list[Event]] = [[] for _ in range(trace.num_ranks)]
    for event in trace.events:
        if event.lane in BESIDE:
            beside[event.rank].append(event)
    return tuple(
        tuple(_gaps_between(trace, rank, events, beside[rank])) for rank, events in enumerate(work_of_ranks(trace))
    )


def idle_by_cause(trace: Trace) -> tuple[dict[Cause, float], ...]:
    """Return the idle seconds of each rank by cause. With its computation and steps they sum to the makespan."""
    ranks = []
    for found in gaps(trace):
        seconds = dict.fromkeys(Cause, 0.0)
        for gap in found:
            seconds[gap.cause] += gap.seconds
        ranks.append(seconds)
    return tuple(ranks)


def critical_path(trace: Trace) -> tuple[Event, ...]:
    """Return the events that make up the makespan, first to last: each let the next one start when it ended.

    Only where a link takes up a transfer before the last one has arrived may two of them overlap.
    """
    if not trace.events:
        return ()
    event = max(trace.events, key=lambda event: (event.end, event.lane is Lane.COMPUTE))
    path = [event]
    while event.after is not None:
        event = trace.events[event.after]
        path.append(event)
        assert len(path) <= len(trace.events), f"{event.name} of rank {event.rank} is said to have come after itself"
    return tuple(reversed(path))


def work_of_ranks(trace: Trace) -> tuple[tuple[Event, ...], ...]:
    """Return what occupied each rank's device, in order: forwards, backwards, and steps that take time."""
    ranks = [list(events) for events in trace.compute]
    for event in trace.events:
        if event.lane is Lane.STEP and event.end > event.start:
            ranks[event.rank].append(event)
    return tuple(tuple(sorted(events, key=lambda event: event.start)) for events in ranks)


def _gaps_between(trace: Trace, rank: int, work: Sequence[Event], beside: Sequence[Event]) -> Iterator[Gap]:
    reached = trace.start
    for number, event in enumerate(work):
        if event.start > reached:
            found = _explain(trace, rank, reached, event)
            yield from map(_as_warm_up, found) if number == 0 else found
        reached = max(reached, event.end)
    yield from _cool_down(rank, reached, trace.start + trace.makespan, beside)


def _as_warm_up(gap: Gap) -> Gap:
    """Return a gap before a rank's first computation: a collective counts as such, all else as warm-up."""
    return gap if gap.cause is Cause.COLLECTIVE else replace(gap, cause=Cause.WARM_UP)


def _cool_down(rank: int, start: float, end: float, beside: Sequence[Event]) -> Iterator[Gap]:
    """Yield the gaps after a rank's last computation. Its own reductions that still run are not cool-down."""
    reached = start
    for event in sorted(beside, key=lambda event: event.start):
        if event.end <= reached:
            continue
        if event.start > reached:
            yield Gap(rank=rank, start=reached, end=event.start, cause=Cause.COOL_DOWN)
        yield _because(event, rank, max(reached, event.start), event.end)
        reached = event.end
    if end > reached:
        yield Gap(rank=rank, start=reached, end=end, cause=Cause.COOL_DOWN)


def _explain(trace: Trace, rank: int, start: float, event: Event) -> list[Gap]:
    """Cut the gap between `start` and an event by going back over what let the event start.

    A transfer or a collective accounts for as long as it ran. The first computation met on the way, the one that made
    what was sent, accounts for all that is left: the rank waited for it, whatever it in turn had to wait for.
    """
    found = []
    end, after = event.start, event.after
    while end > start:
        if after is None:
            found.append(Gap(rank=rank, start=start, end=end, cause=Cause.WAITING))
            break
        cause = trace.events[after]
        after = cause.after
        if cause.lane is Lane.RECEIVE or (cause.lane is Lane.STEP and cause.rank == rank):
            continue  # It neither moves bytes nor takes time here; what it waited for does.
        begin = start if cause.lane in (Lane.COMPUTE, Lane.STEP) else max(start, cause.start)
        if begin < end:
            found.append(_because(cause, rank, begin, end))
            end = begin
    return found[::-1]


def _because(event: Event, rank: int, start: float, end: float) -> Gap:
    cause = _CAUSES.get(event.lane, Cause.WAITING)
    return Gap(rank=rank, start=start, end=end, cause=cause, on_rank=event.rank, on=event.name)
