"""Attribute a GPU's time to activities: for each of its streams, and for the device as a whole.

    stream 7    | kernel | kernel |        | kernel |     |
    stream 20            | all reduce ------ |
    the device  | compute         | exposed  | compute | idle

On a stream one activity runs after the other. For the device, each moment counts once: a running kernel hides a
collective, and both hide a copy. When nothing runs, either an activity was launched and has not started yet, or the
host has launched nothing.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from shardwise.trace.activities import COPIES, WORK, Activity, ActivityKind, collective_of
from shardwise.trace.events import Trace


class State(StrEnum):
    """The state of a device at a moment."""

    COMPUTE = "compute"
    COMMUNICATION = "exposed communication"  # No kernel runs, and a collective moves bytes.
    WAITING = "waiting"  # No kernel runs, and a collective waits for a rank that has not begun it.
    COPIES = "exposed copies"  # Neither a kernel nor a collective runs, and a copy does.
    LAUNCHED = "launch gaps"  # Nothing runs, and an activity has been launched.
    IDLE = "idle"  # The host has launched nothing.


class Span(NamedTuple):
    """A stretch of a device's time. `on` is what the device waits for."""

    start: float
    end: float
    state: State
    on: str | None = None


#: A stretch of time, and what it is.
_Piece = tuple[float, float, str | None]
#: What may lie between two kernels of a busy stream.
_LATENCY_SECONDS = 20e-6


class _Gap(NamedTuple):
    """A time in which no kernel runs, and when the one was launched that ends it."""

    start: float
    end: float
    launched: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUse:
    """What a stream of a rank did in its step. `seconds` are by what; with `idle_seconds` they are the step."""

    rank: int
    stream: int
    seconds: dict[str, float]
    idle_seconds: float
    num_activities: int

    @property
    def role(self) -> str:
        """What it is mostly there for."""
        sums = {"compute": 0.0, "NCCL": 0.0, "copies": 0.0}
        for kind, seconds in self.seconds.items():
            role = "NCCL" if kind.startswith("NCCL") else "copies" if kind in COPIES else "compute"
            sums[role] += seconds
        return max(sums, key=lambda role: sums[role])


def streams_of_ranks(trace: Trace) -> tuple[tuple[StreamUse, ...], ...]:
    """Return the streams of each rank, the busiest first; None if its device was not recorded."""
    found = []
    for rank, activities in enumerate(trace.activities_of_ranks):
        by_stream: dict[int, list[Activity]] = defaultdict(list)
        for each in activities:
            by_stream[each.stream].append(each)
        uses = [_use(trace.windows[rank], rank, stream, mine) for stream, mine in by_stream.items()]
        found.append(tuple(sorted(uses, key=lambda use: (use.idle_seconds, use.stream))))
    return tuple(found)


def _use(window: tuple[float, float], rank: int, stream: int, activities: Sequence[Activity]) -> StreamUse:
    seconds: dict[str, float] = defaultdict(float)
    reached = window[0]
    for each in activities:
        # A kernel may begin while the one before it ends (programmatic launches): no moment counts twice.
        start, end = max(each.start, reached), min(each.end, window[1])
        if end > start:
            seconds[word_of(each)] += end - start
            reached = end
    idle = window[1] - window[0] - sum(seconds.values())
    return StreamUse(rank=rank, stream=stream, seconds=dict(seconds), idle_seconds=idle, num_activities=len(activities))


def word_of(activity: Activity) -> str:
    """Return the category of an activity: NCCL by collective, all others by kind."""
    return collective_of(activity.name) if activity.kind is ActivityKind.NCCL else str(activity.kind)


def seconds_by_word(activities: Iterable[Activity]) -> dict[str, float]:
    """Return how long activities took, each separately, by category."""
    seconds: dict[str, float] = defaultdict(float)
    for each in activities:
        seconds[word_of(each)] += each.seconds
    return dict(seconds)


def device_spans(trace: Trace) -> tuple[tuple[Span, ...], ...]:
    """Return what each rank's device did during the whole step; empty if it was not recorded."""
    begun = _last_arrivals(trace)
    whole = trace.start, trace.start + trace.makespan
    return tuple(tuple(_spans(whole, mine, begun)) if mine else () for mine in trace.activities_of_ranks)


def _last_arrivals(trace: Trace) -> dict[Activity, float]:
    """Return, for every collective with known ranks, when the last of them started it."""
    found: dict[Activity, float] = {}
    together: dict[tuple[str, str, int], list[Activity]] = defaultdict(list)
    for activities in trace.activities_of_ranks:
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for each in activities:
            if each.kind is ActivityKind.NCCL and each.group:
                key = each.purpose, each.group
                together[*key, counts[key]].append(each)
                counts[key] += 1
    for same in together.values():
        last = max(each.start for each in same)
        for each in same:
            found[each] = min(last, each.end)
    return found


def _spans(whole: tuple[float, float], activities: Sequence[Activity], begun: dict[Activity, float]) -> Iterator[Span]:
    """Yield the device's time, cut wherever its activity changes."""
    work = [each for each in activities if each.kind in WORK]
    busy = _flat((each.start, each.end, None) for each in work)
    gaps = _gaps(busy, work, whole)
    nccl = [each for each in activities if each.kind is ActivityKind.NCCL]
    copies = [each for each in activities if each.kind in COPIES]
    layers = (
        (State.COMPUTE, busy),
        (State.COMMUNICATION, _flat(p for each in nccl for p in _exposed(each, begun.get(each), each.end, gaps))),
        (State.WAITING, _flat(p for each in nccl for p in _exposed(each, None, begun.get(each, each.start), gaps))),
        (State.COPIES, _flat(p for each in copies for p in _exposed(each, None, each.end, gaps))),
        (State.LAUNCHED, _flat((_launched(each), each.start, None) for each in activities)),
    )
    changes = {time for _, pieces in layers for piece in pieces for time in piece[:2]}
    times = sorted({*whole, *(time for time in changes if whole[0] < time < whole[1])})
    places = [0] * len(layers)
    last: Span | None = None
    for start, end in pairwise(times):
        state, on = State.IDLE, None
        for number, (name, pieces) in enumerate(layers):
            while places[number] < len(pieces) and pieces[places[number]][1] <= start:
                places[number] += 1
            if places[number] < len(pieces) and pieces[places[number]][0] <= start:
                state, on = name, pieces[places[number]][2]
                break
        if last is not None and (last.state, last.on) == (state, on):
            last = last._replace(end=end)
            continue
        if last is not None:
            yield last
        last = Span(start, end, state, on)
    if last is not None:
        yield last


def _gaps(busy: Sequence[_Piece], work: Sequence[Activity], whole: tuple[float, float]) -> list[_Gap]:
    """Return when no kernel runs. `work` is in order, so the first that starts with a piece ended the gap."""
    launched: dict[float, float] = {}
    for each in work:
        launched.setdefault(each.start, each.start if each.launched is None else each.launched)
    found, reached = [], whole[0]
    for start, end, _ in busy:
        found.append(_Gap(reached, start, launched.get(start, start)))
        reached = end
    return [*found, _Gap(reached, float("inf"), reached)]


def _exposed(activity: Activity, start: float | None, end: float, gaps: Sequence[_Gap]) -> Iterator[_Piece]:
    """Yield the parts of a move from `start` to `end` in which a device waits for it.

    What goes on when the next kernel begins was not what this had waited for: the host was late, or it was the moment
    between two kernels. Unless that was launched long before.
    """
    begin = activity.start if start is None else start
    place = max(bisect_right(gaps, begin, key=lambda gap: gap.start) - 1, 0)
    while place < len(gaps) and gaps[place].start < end:
        gap = gaps[place]
        was_ready = gap.end - gap.start > _LATENCY_SECONDS and gap.launched <= gap.start
        if activity.end <= gap.end or was_ready:
            yield max(begin, gap.start), min(end, gap.end), activity.what
        place += 1


def _launched(activity: Activity) -> float:
    return activity.start if activity.launched is None else activity.launched


def _flat(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Return intervals in order without overlaps: the one that began first keeps the overlap."""
    found: list[_Piece] = []
    reached = float("-inf")
    for start, end, what in sorted(pieces, key=lambda piece: piece[:2]):
        begin = max(start, reached)
        if end > begin:
            found.append((begin, end, what))
            reached = end
    return found
