"""Record an executed step as a trace in the simulator's format.

During a step, recording costs one list append for each instruction and for each wait. Names, causes of waits and memory
holdings are derived after the step. The spans of each rank are converted to one clock and exchanged as columns of plain
values: packing thousands of spans one by one would take longer than making them.

A host launches kernels on a GPU asynchronously, so the host's times say nothing about kernel times. Therefore an event
is recorded on the stream after every instruction, and the event times are read when the step has ended. Kernels of a
stream run in order: an instruction began when it was launched, or when its predecessor on the stream had ended.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.ranks.message_layout import Key
from shardwise.schedule.instruction import BACKWARD, RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.prices import activations
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import LANES
from shardwise.trace.activities import Activity
from shardwise.trace.events import Event, Holding, Lane, Trace, Traffic

#: The lanes whose events can be the cause of a rank's next event. A receive is one: the rank resumes because of it.
_IN_ORDER = frozenset({Lane.COMPUTE, Lane.STEP, Lane.RECEIVE})
_LANES = tuple(Lane)
_NUMBERS = {lane: number for number, lane in enumerate(_LANES)}

#: The owners of the bytes that a rank holds during a step.
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "parameters", "gradients", "optimizer", "activations"

#: An executed instruction with its start and end in seconds.
Ran = tuple[Instruction, float, float]


class Clock(Protocol):
    """Makes marks, and gives their times afterwards."""

    def mark(self) -> Any: ...

    def times(self, marks: Sequence[Any]) -> list[float]: ...


class DeviceClock:
    """A clock of CUDA events on the current stream. It is made while the GPU is idle."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._device, self._host = device, perf_counter()
        self._begin = self.mark()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return event

    def times(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Wait for all marks, and return their times in seconds of the host's clock."""
        torch.cuda.synchronize(self._device)
        return [self._host + self._begin.elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(tensors: Iterable[Tensor]) -> Clock | None:
    """Return the clock of the GPU that tensors are on; None if they are on the CPU."""
    device = next((each.device for each in tensors), None)
    return DeviceClock(device) if device is not None and device.type == "cuda" else None


class Span(NamedTuple):
    """An action or a wait of a rank. `position` is that of its instruction in the rank's list; without one it has a
    name.

    `peer` is the world rank that a wait was for; None means all participants.
    """

    name: str
    lane: Lane
    start: float
    end: float
    position: int | None = None
    peer: int | None = None


class Launch(NamedTuple):
    """A collective about to be launched: when, its kind, its purpose and its group of ranks."""

    time: float
    kind: str
    purpose: str
    group: str


class RankTrace(NamedTuple):
    """The spans of one rank in a step: its place in its pipeline, the step's window, actions, memory and traffic."""

    place: int
    window: tuple[float, float] | None
    spans: list[Span]
    holdings: list[Holding]
    traffic: list[Traffic]
    activities: list[Activity]

    def by_clock(self, correction: float) -> "RankTrace":
        """Return the same spans on a clock that differs by `correction` seconds."""
        if correction == 0:
            return self
        window = None if self.window is None else (self.window[0] + correction, self.window[1] + correction)
        spans = [each._replace(start=each.start + correction, end=each.end + correction) for each in self.spans]
        holdings = [each._replace(time=each.time + correction) for each in self.holdings]
        activities = [each.later(correction) for each in self.activities]
        return RankTrace(self.place, window, spans, holdings, self.traffic, activities)

    def packed(self) -> tuple[Any, ...]:
        """Return the same spans as columns of plain values."""
        spans = _columns(self.spans, Span)
        spans[1] = [_NUMBERS[lane] for lane in spans[1]]
        rows = ((self.holdings, Holding), (self.traffic, Traffic), (self.activities, Activity))
        return self.place, self.window, spans, *(_columns(each, kind) for each, kind in rows)

    @staticmethod
    def unpacked(given: tuple[Any, ...]) -> "RankTrace":
        """Return the spans that `packed` gave."""
        place, window, spans, holdings, traffic, activities = given
        spans = [spans[0], [_LANES[number] for number in spans[1]], *spans[2:]]
        rows = (list(map(Span, *spans)), list(map(Holding, *holdings)), list(map(Traffic, *traffic)))
        return RankTrace(place, window, *rows, list(map(Activity, *activities)))


def _columns(rows: Sequence[tuple[Any, ...]], kind: Any) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in kind._fields]


def memory_by_owner(
    rank: int, ran: Iterable[Ran], *, begin: float, state: Mapping[str, int], kept: Mapping[int, int]
) -> Iterator[Holding]:
    """Yield the memory that a rank held in a step. `state`: bytes by owner; `kept`: bytes a forward keeps, by stage.

    Parameters and optimizer state are held throughout, gradients from the first backward on, activations from the start
    of a forward to the end of its backward.
    """
    for owner in (PARAMETERS, OPTIMIZER):
        if state.get(owner):
            yield Holding(rank, owner, begin, state[owner])
    has_gradients = False
    for instruction, start, end in ran:
        for part in instruction.parts:
            if part.kind in BACKWARD and not has_gradients and state.get(GRADIENTS):
                has_gradients = True
                yield Holding(rank, GRADIENTS, start, state[GRADIENTS])
            num_bytes = kept.get(part.stage, 0)
            if num_bytes and part.kind is Kind.F:
                yield Holding(rank, ACTIVATIONS, start, num_bytes)
            elif num_bytes and part.kind in (Kind.B, Kind.W):
                yield Holding(rank, ACTIVATIONS, end, -num_bytes)


class Recording:
    """Notes the actions of this process's ranks in a step. `pipelines` has the world ranks of each pipeline.

    With a `clock`, times are those of execution on the device, not of the launch by the host.
    """

    def __init__(
        self, schedule: Schedule, pipelines: Sequence[Sequence[int]] | None = None, *, clock: Clock | None = None
    ) -> None:
        self._schedule, self._clock = schedule, clock
        self._marks: list[tuple[list[Any], int, Any]] = []
        self.pipelines = pipelines or [range(schedule.num_ranks)]
        self._run: list[tuple[int, Instruction, float, float]] = []
        self._again: list[tuple[int, Instruction, float, float]] = []
        self._waits: list[tuple[object, int | None, float, float]] = []
        self._beside: list[tuple[str, float, float]] = []
        #: Collectives in the order in which they were launched.
        self.launches: list[Launch] = []
        self._told: dict[int, RankTrace] = {}

    def note(self, place: int, instruction: Instruction, start: float, end: float) -> None:
        """Record that a rank ran an instruction, with start and end in seconds of a clock that all ranks share."""
        self._note(self._run, (place, instruction, start, end))

    def note_again(self, place: int, instruction: Instruction, start: float, end: float) -> None:
        """Record that a forward was recomputed for a backward."""
        self._note(self._again, (place, instruction, start, end))

    def note_wait(self, what: object, peer: int | None, start: float, end: float) -> None:
        """Record that the rank of this process waited for something."""
        self._note(self._waits, (what, peer, start, end))

    def note_collective(self, ranks: str, kind: str, start: float, end: float) -> None:
        """Record that the rank waited inside an instruction. No mark is made: on a device the wait is part of it."""
        self._waits.append((f"{kind} of ranks {ranks}", None, start, end))

    def note_beside(self, what: str, start: float, end: float) -> None:
        """Record that data moved beside the computation of this process's rank. Any thread may call this."""
        self._beside.append((what, start, end))

    def note_launch(self, group: str, purpose: str | None, kind: str) -> None:
        """Record that a collective is about to be launched in a group; without a `purpose`, its kind is its name."""
        self.launches.append(Launch(perf_counter(), kind, purpose or f"{kind} of ranks {group}", group))

    def note_step(self, place: int, start: float, end: float) -> None:
        """Record that all stages of a rank have stepped."""
        step = next(each for each in reversed(self._schedule.orders[place]) if each.kind is Kind.STEP)
        self._note(self._run, (place, step, start, end))

    def _note(self, spans: list[Any], what: tuple[Any, ...]) -> None:
        spans.append(what)
        if self._clock is not None:
            self._marks.append((spans, len(spans) - 1, self._clock.mark()))

    def settle(self) -> None:
        """Replace the host's times by the device's.

        An instruction began when the host launched it, or when all that was launched before it had ended.
        """
        if self._clock is None:
            return
        times = self._clock.times([mark for _, _, mark in self._marks])
        handed_over: list[float] = []
        ended = [0.0]
        for (spans, place, _), done in zip(self._marks, times, strict=True):
            *what, start, end = spans[place]
            # Only predecessors launched before `start`: a note made inside this one was launched later.
            begun = max(start, ended[bisect_right(handed_over, start)])
            spans[place] = (*what, begun, max(done, begun))
            handed_over.append(end)
            ended.append(max(done, ended[-1]))
        self._marks = []

    def ran_by(self, place: int) -> list[Ran]:
        """Return the instructions that a rank of this process has run, with their times."""
        return [(each, start, end) for who, each, start, end in self._run if who == place]

    def told_by(
        self,
        place: int,
        window: tuple[float, float] | None = None,
        *,
        data_wait: float = 0.0,
        holdings: Iterable[Holding] = (),
        traffic: Iterable[Traffic] = (),
        activities: Iterable[Activity] = (),
    ) -> RankTrace:
        """Return the spans of a rank of this process, ready to be sent to others. `window` is the step's start and end.

        The wait for the batch, just before `window`, belongs to the step. So do all device activities after its start.
        """
        seen = list(activities)
        positions = {each: number for number, each in enumerate(self._schedule.orders[place])}
        spans = [Span("", LANES[each.kind], start, end, positions[each]) for each, start, end in self.ran_by(place)]
        spans += [
            Span("", Lane.RECOMPUTE, start, end, positions[each])
            for who, each, start, end in self._again
            if who == place
        ]
        if window is not None:
            for what, peer, start, end in self._waits:
                if isinstance(what, Key):
                    spans.append(Span("", Lane.RECEIVE, start, end, positions[_receive_of(what)], peer))
                else:
                    spans.append(Span(str(what), Lane.WAIT, start, end, None, peer))
            spans += [Span(name, Lane.COLLECTIVE, start, end) for name, start, end in self._beside]
            ends = [span.end for span in spans] + [each.end for each in seen]
            window = (window[0], max(window[1], *ends, window[0]))
            if data_wait > 0:
                window = (window[0] - data_wait, window[1])
                spans.append(Span("batch", Lane.DATA, window[0], window[0] + data_wait))
            seen = [each._replace(start=max(each.start, window[0])) for each in seen if each.end > window[0]]
        return RankTrace(place, window, spans, list(holdings), list(traffic), seen if window is not None else [])

    def take(self, rank: int, told: RankTrace) -> None:
        """Store the spans of a world rank."""
        self._told[rank] = told

    def trace(self) -> Trace:
        """Return the trace of all spans, from 0 seconds on. Events count memory in microbatch-stages, as simulated."""
        ranks = [self._told[rank] for rank in sorted(self._told)]
        windows = tuple(told.window for told in ranks if told.window is not None)
        starts = [span.start for told in ranks for span in told.spans] + [start for start, _ in windows]
        zero = min(starts, default=0.0)
        events = [event for rank in sorted(self._told) for event in self._events_of(rank, zero)]
        return Trace(
            name=self._schedule.name,
            num_ranks=len(ranks),
            events=tuple(self._linked(events)),
            windows=tuple((start - zero, end - zero) for start, end in windows),
            holdings=tuple(each._replace(time=each.time - zero) for told in ranks for each in told.holdings),
            traffic=tuple(each for told in ranks for each in told.traffic),
            activities=tuple(each.later(-zero) for told in ranks for each in told.activities),
        )

    def _events_of(self, rank: int, zero: float) -> list[Event]:
        told = self._told[rank]
        order, pipeline = self._schedule.orders[told.place], self.pipeline_of(rank)
        held = activations(self._schedule.placement)
        # Waits of the same name are numbered, so that those of several ranks can be matched.
        numbers: Counter[tuple[Lane, str]] = Counter()
        events = []
        for span in sorted(told.spans, key=lambda span: (span.start, -span.end)):
            name, stage, microbatch = span.name, -1, numbers[span.lane, span.name]
            peer, change = span.peer, (0.0, 0.0)
            if span.position is None:
                numbers[span.lane, span.name] += 1
            else:
                instruction = order[span.position]
                name, stage, microbatch = str(instruction), instruction.stage, instruction.microbatch
                if span.lane is LANES[instruction.kind]:
                    change = held(instruction)
                if instruction.peer is not None and instruction.kind in SENDS | RECEIVES:
                    peer = pipeline[self._schedule.placement.ranks[instruction.peer]]
            times = span.start - zero, span.end - zero
            events.append(Event(name, rank, span.lane, *times, stage, microbatch, *change, None, peer))
        return events

    def pipeline_of(self, rank: int) -> Sequence[int]:
        """Return the world ranks of the pipeline that contains a rank."""
        return next(ranks for ranks in self.pipelines if rank in ranks)

    def _linked(self, events: list[Event]) -> list[Event]:
        """Set the cause (`after`) of each event: for a receive its send, otherwise the rank's previous event."""
        sends = {(each.rank, each.name): index for index, each in enumerate(events) if each.lane is Lane.SEND}
        linked: list[Event] = []
        before: dict[int, int] = {}
        for index, event in enumerate(events):
            after: int | None
            if event.lane is Lane.RECEIVE:
                after = None if event.peer is None else sends.get((event.peer, _sending(event.name)))
            else:
                after = before.get(event.rank)
            linked.append(event if after is None else event._replace(after=after))
            if event.lane in _IN_ORDER and (event.lane is not Lane.RECEIVE or after is not None):
                before[event.rank] = index
        return linked


def _receive_of(message: Key) -> Instruction:
    """Return the instruction that waits for a message."""
    kind = Kind.RECV_F if message.kind == "F" else Kind.RECV_B
    return Instruction(kind, message.reader, message.microbatch, message.maker)


def _sending(receive: str) -> str:
    """Return the send of a receive: `0SEND_F2>1` for `1RECV_F2<0`."""
    reader, _, rest = receive.partition("RECV_")
    value, _, maker = rest.partition("<")
    return f"{maker}SEND_{value}>{reader}"
