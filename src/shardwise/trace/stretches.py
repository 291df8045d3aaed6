"""Cut each rank's step into stretches, each with its part (compute, waiting, ...). They add up to the step.

    rank 1   | warm-up | compute | waiting | exposed | compute | ... | optimizer | cool-down |

A simulated trace has a reason for every idle moment already (`attribution.py`). In a measured trace, the rank has noted
what it waited for, and the other side when it sent: until then the wait is a bubble, from then on it is exposed
communication. Time without a note is the host's own work.

If the activities of a GPU were recorded (`streams.py`), they take precedence: a forward during which the device is idle
is no computation.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from shardwise.trace.attribution import EXPOSED, Cause, gaps, work_of_ranks
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.streams import Span, State, device_spans


class Part(StrEnum):
    """The category of a stretch of a step."""

    COMPUTE = "compute"
    RECOMPUTATION = "recomputation"
    OPTIMIZER = "optimizer"
    EXPOSED = "exposed communication"
    COPIES = "exposed copies"  # GPU only: a copy between device and host, while nothing else runs on the device.
    WARM_UP = "warm-up"
    WAITING = "waiting"
    COOL_DOWN = "cool-down"
    DATA = "data wait"
    LAUNCH = "launch gaps"  # GPU only: a kernel was launched and does not run yet.
    HOST = "host overhead"


#: The rank idles for lack of input.
BUBBLE = frozenset({Part.WARM_UP, Part.WAITING, Part.COOL_DOWN})
#: The device is at work.
BUSY = frozenset({Part.COMPUTE, Part.RECOMPUTATION, Part.OPTIMIZER})
#: Causes of waiting that are known; the activities of the device add nothing.
_EXPLAINED = BUBBLE | {Part.EXPOSED, Part.DATA}

_OF_STATE = {
    State.COMPUTE: Part.COMPUTE,
    State.COMMUNICATION: Part.EXPOSED,
    State.WAITING: Part.WAITING,
    State.COPIES: Part.COPIES,
    State.LAUNCHED: Part.LAUNCH,
    State.IDLE: Part.HOST,
}
_OF_CAUSE = {cause: Part.EXPOSED if cause in EXPOSED else Part(cause) for cause in Cause}
_OF_LANE = {
    Lane.COMPUTE: Part.COMPUTE,
    Lane.RECOMPUTE: Part.RECOMPUTATION,
    Lane.STEP: Part.OPTIMIZER,
    Lane.SEND: Part.EXPOSED,  # The computing thread itself packs a message and hands it over.
    Lane.DATA: Part.DATA,
}


class Stretch(NamedTuple):
    """A stretch of a rank's step. `on` is the name of the event that the rank waits for, of rank `on_rank`."""

    rank: int
    start: float
    end: float
    part: Part
    on: str | None = None
    on_rank: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def stretches(trace: Trace) -> tuple[tuple[Stretch, ...], ...]:
    """Return the whole step of each rank, in order, without gaps."""
    return _measured(trace) if trace.is_measured else _predicted(trace)


def parts_of_ranks(trace: Trace, cut: Sequence[Sequence[Stretch]] | None = None) -> tuple[dict[Part, float], ...]:
    """Return the seconds of each part for each rank. Their sum is the makespan. `cut` are the trace's stretches."""
    ranks = []
    for found in stretches(trace) if cut is None else cut:
        seconds = dict.fromkeys(Part, 0.0)
        for stretch in found:
            seconds[stretch.part] += stretch.seconds
        ranks.append(seconds)
    return tuple(ranks)


def _predicted(trace: Trace) -> tuple[tuple[Stretch, ...], ...]:
    found = []
    for work, idle in zip(work_of_ranks(trace), gaps(trace), strict=True):
        mine = [Stretch(each.rank, each.start, each.end, _OF_LANE[each.lane]) for each in work]
        mine += [Stretch(gap.rank, gap.start, gap.end, _OF_CAUSE[gap.cause], gap.on, gap.on_rank) for gap in idle]
        found.append(tuple(sorted(mine, key=lambda stretch: stretch.start)))
    return tuple(found)


def _measured(trace: Trace) -> tuple[tuple[Stretch, ...], ...]:
    """Return the step, which is the same for all ranks: from the first rank's start to the last one's end."""
    ranks: list[list[Event]] = [[] for _ in range(trace.num_ranks)]
    for event in trace.events:
        ranks[event.rank].append(event)
    arrivals = _last_arrivals(trace)
    devices = device_spans(trace)
    found = []
    for rank, events in enumerate(ranks):
        spans = [(event.start, event.end) for event in trace.compute[rank]] or [(trace.start, trace.start)]
        work = (spans[0][0], max(end for _, end in spans))
        noted = [each for event in events for each in _noted(trace, event, work, arrivals)]
        noted.append(Stretch(rank, trace.windows[rank][1], trace.start + trace.makespan, Part.COOL_DOWN))
        filled = _filled(rank, trace.start, trace.start + trace.makespan, noted)
        found.append(tuple(_as_seen(filled, devices[rank]) if devices[rank] else filled))
    return tuple(found)


def _as_seen(noted: Iterable[Stretch], spans: Sequence[Span]) -> Iterator[Stretch]:
    """Yield what was recorded, cut by the activities of the rank's device. Both cover the whole step, without gaps."""
    place = 0
    for stretch in noted:
        reached = stretch.start
        while reached < stretch.end:
            while spans[place].end <= reached and place + 1 < len(spans):
                place += 1
            span = spans[place]
            end = stretch.end if place + 1 == len(spans) else min(stretch.end, span.end)
            yield _seen(stretch, span)._replace(start=reached, end=end)
            reached = end


def _seen(stretch: Stretch, span: Span) -> Stretch:
    """Return the category of a moment for which both a recorded event and an activity are known."""
    if span.state is State.COMPUTE:
        is_other = stretch.part in BUBBLE or stretch.part is Part.HOST
        return Stretch(stretch.rank, 0.0, 0.0, Part.COMPUTE) if is_other else stretch
    if stretch.part in _EXPLAINED:
        return stretch
    return Stretch(stretch.rank, 0.0, 0.0, _OF_STATE[span.state], span.on)


def _noted(
    trace: Trace, event: Event, work: tuple[float, float], arrivals: dict[tuple[str, int, int], float]
) -> Iterator[Stretch]:
    """Yield the category of an event of the rank's own thread. Concurrent transfers are not waits."""
    if event.lane in _OF_LANE:
        yield Stretch(event.rank, event.start, event.end, _OF_LANE[event.lane])
    elif event.lane in (Lane.RECEIVE, Lane.WAIT):
        idle = Part.WARM_UP if event.end <= work[0] else Part.COOL_DOWN if event.start >= work[1] else Part.WAITING
        if event.lane is Lane.RECEIVE:
            send = None if event.after is None else trace.events[event.after]
            moves = event.start if send is None else send.start
            on, on_rank = event.name if send is None else send.name, event.peer
        else:
            moves, on, on_rank = arrivals[event.name, event.microbatch, event.rank], event.name, event.peer
        moves = min(max(moves, event.start), event.end)
        yield Stretch(event.rank, event.start, moves, idle, on, on_rank)
        yield Stretch(event.rank, moves, event.end, Part.EXPOSED, on, on_rank)


def _last_arrivals(trace: Trace) -> dict[tuple[str, int, int], float]:
    """Return, for every wait, when the last participant arrived: its peer, or all that wait for the same.

    Waits of a name are numbered on each rank (`microbatch`), so that those of several ranks are found to belong
    together.
    """
    waits = {(each.name, each.microbatch, each.rank): each for each in trace.events if each.lane is Lane.WAIT}
    latest: dict[tuple[str, int], float] = {}
    for (name, number, _), event in waits.items():
        latest[name, number] = max(latest.get((name, number), event.start), event.start)
    found = {}
    for (name, number, rank), event in waits.items():
        both = event if event.peer is None else waits.get((name, number, event.peer), event)
        found[name, number, rank] = latest[name, number] if event.peer is None else max(event.start, both.start)
    return found


def _filled(rank: int, start: float, end: float, noted: Sequence[Stretch]) -> Iterator[Stretch]:
    """Yield what was recorded, the innermost if events are nested, and the host's work in between."""
    open_: list[Stretch] = []
    reached = start

    def until(time: float) -> Iterator[Stretch]:
        nonlocal reached
        if time > reached:
            inner = open_[-1] if open_ else Stretch(rank, start, end, Part.HOST)
            yield inner._replace(start=reached, end=time)
            reached = time

    for each in sorted(noted, key=lambda stretch: (stretch.start, -stretch.end)):
        if each.end <= each.start:
            continue
        while open_ and open_[-1].end <= each.start:
            yield from until(open_[-1].end)
            open_.pop()
        yield from until(min(each.start, end))
        open_.append(each)
    while open_:
        yield from until(min(open_[-1].end, end))
        open_.pop()
    yield from until(end)
