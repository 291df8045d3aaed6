"""What an executor did, as a trace in the simulator's format.

During a step that is an append for each instruction, and for each time that a rank stands still. The rest is done at
its end: names, who waited for whom, and what was held. What each rank noted is told to all by one clock, in columns of
plain values: thousands of notes one by one would take longer to pack than to note.

A host hands kernels to a GPU and goes on; how long that took says nothing of how long they take. So a mark is put into
the stream behind every instruction, and the times of the marks are asked for when the step has ended. Kernels of a
stream run one after the other: an instruction began when it was handed over, or when what was before it had ended.
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

#: What has come in is the reason why the rank goes on; what it did before that is not.
_IN_ORDER = frozenset({Lane.COMPUTE, Lane.STEP, Lane.RECEIVE})
_LANES = tuple(Lane)
_NUMBERS = {lane: number for number, lane in enumerate(_LANES)}

#: Whose the bytes are that a rank holds during a step.
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "parameters", "gradients", "optimizer", "activations"

#: An instruction that was run, from when to when.
Ran = tuple[Instruction, float, float]


class Clock(Protocol):
    """What puts marks, and knows their times afterwards."""

    def mark(self) -> Any: ...

    def times(self, marks: Sequence[Any]) -> list[float]: ...


class DeviceClock:
    """The current stream of a GPU. It is made when nothing is under way there."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._device, self._host = device, perf_counter()
        self._begin = self.mark()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return event

    def times(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Seconds by the host's clock. Waits until all of them have come."""
        torch.cuda.synchronize(self._device)
        return [self._host + self._begin.elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(tensors: Iterable[Tensor]) -> Clock | None:
    """The clock of the GPU that tensors are on; None where the host computes itself."""
    device = next((each.device for each in tensors), None)
    return DeviceClock(device) if device is not None and device.type == "cuda" else None


class Note(NamedTuple):
    """Something that a rank did or stood still for. `position` is that of its instruction in the rank's list; what has
    none has a name.

    `peer` is the rank of the world that it stood still for; None is all who take part.
    """

    name: str
    lane: Lane
    start: float
    end: float
    position: int | None = None
    peer: int | None = None


class Launch(NamedTuple):
    """That a collective of a kind was about to be launched, in some ranks, for a purpose."""

    time: float
    kind: str
    purpose: str
    group: str


class RankNotes(NamedTuple):
    """What one rank tells of a step: its place in its pipeline, when the step was, what it did, held and sent."""

    place: int
    window: tuple[float, float] | None
    notes: list[Note]
    holdings: list[Holding]
    traffic: list[Traffic]
    activities: list[Activity]

    def by_clock(self, correction: float) -> "RankNotes":
        """The same by another clock."""
        if correction == 0:
            return self
        window = None if self.window is None else (self.window[0] + correction, self.window[1] + correction)
        notes = [each._replace(start=each.start + correction, end=each.end + correction) for each in self.notes]
        holdings = [each._replace(time=each.time + correction) for each in self.holdings]
        activities = [each.later(correction) for each in self.activities]
        return RankNotes(self.place, window, notes, holdings, self.traffic, activities)

    def packed(self) -> tuple[Any, ...]:
        """The same in plain values."""
        notes = _columns(self.notes, Note)
        notes[1] = [_NUMBERS[lane] for lane in notes[1]]
        rows = ((self.holdings, Holding), (self.traffic, Traffic), (self.activities, Activity))
        return self.place, self.window, notes, *(_columns(each, kind) for each, kind in rows)

    @staticmethod
    def unpacked(given: tuple[Any, ...]) -> "RankNotes":
        """What was packed."""
        place, window, notes, holdings, traffic, activities = given
        notes = [notes[0], [_LANES[number] for number in notes[1]], *notes[2:]]
        rows = (list(map(Note, *notes)), list(map(Holding, *holdings)), list(map(Traffic, *traffic)))
        return RankNotes(place, window, *rows, list(map(Activity, *activities)))


def _columns(rows: Sequence[tuple[Any, ...]], kind: Any) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in kind._fields]


def holdings_of(
    rank: int, ran: Iterable[Ran], *, begin: float, state: Mapping[str, int], kept: Mapping[int, int]
) -> Iterator[Holding]:
    """What a rank held in a step. `state` are bytes by owner, `kept` those that a forward of each stage keeps.

    Parameters and the optimizer's state are there all the time, gradients from the first backward on, activations from
    a forward's start to its backward's end.
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
    """Notes what the ranks of this process do in a step. `pipelines` are the ranks of each in the world.

    With a `clock`, times are when the device has done what it was told to, not when it was told.
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
        self._told: dict[int, RankNotes] = {}

    def note(self, place: int, instruction: Instruction, start: float, end: float) -> None:
        """Note that a rank ran an instruction, from when to when, in seconds of any clock that all ranks share."""
        self._note(self._run, (place, instruction, start, end))

    def note_again(self, place: int, instruction: Instruction, start: float, end: float) -> None:
        """Note that a forward was made again for a backward."""
        self._note(self._again, (place, instruction, start, end))

    def note_wait(self, what: object, peer: int | None, start: float, end: float) -> None:
        """Note that the rank of this process stood still for something."""
        self._note(self._waits, (what, peer, start, end))

    def note_collective(self, ranks: str, kind: str, start: float, end: float) -> None:
        """Note that the rank waited inside of an instruction. On a device this is not seen: it is part of it."""
        self._waits.append((f"{kind} of ranks {ranks}", None, start, end))

    def note_beside(self, what: str, start: float, end: float) -> None:
        """Note that something moved beside the computation of the rank of this process; any thread may."""
        self._beside.append((what, start, end))

    def note_launch(self, group: str, purpose: str | None, kind: str) -> None:
        """Note that a collective is about to be launched: in which ranks, and what for where it is not its kind."""
        self.launches.append(Launch(perf_counter(), kind, purpose or f"{kind} of ranks {group}", group))

    def note_step(self, place: int, start: float, end: float) -> None:
        """Note that all stages of a rank have stepped."""
        step = next(each for each in reversed(self._schedule.orders[place]) if each.kind is Kind.STEP)
        self._note(self._run, (place, step, start, end))

    def _note(self, notes: list[Any], what: tuple[Any, ...]) -> None:
        notes.append(what)
        if self._clock is not None:
            self._marks.append((notes, len(notes) - 1, self._clock.mark()))

    def settle(self) -> None:
        """Put in the place of the times at which the host was done those at which the device was.

        What the host handed over began then, or when all that was handed over before it had ended.
        """
        if self._clock is None:
            return
        times = self._clock.times([mark for _, _, mark in self._marks])
        handed_over: list[float] = []
        ended = [0.0]
        for (notes, place, _), done in zip(self._marks, times, strict=True):
            *what, start, end = notes[place]
            # Not what is noted inside of it: that was handed over later than its own beginning.
            begun = max(start, ended[bisect_right(handed_over, start)])
            notes[place] = (*what, begun, max(done, begun))
            handed_over.append(end)
            ended.append(max(done, ended[-1]))
        self._marks = []

    def ran_by(self, place: int) -> list[Ran]:
        """The instructions that a rank of this process has run, and when."""
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
    ) -> RankNotes:
        """What a rank of this process did, in a form that can be told to others. `window` is when its step was.

        The batch was waited for just before that, and belongs to the step. So does all that its device did after that.
        """
        seen = list(activities)
        positions = {each: number for number, each in enumerate(self._schedule.orders[place])}
        notes = [Note("", LANES[each.kind], start, end, positions[each]) for each, start, end in self.ran_by(place)]
        notes += [
            Note("", Lane.RECOMPUTE, start, end, positions[each])
            for who, each, start, end in self._again
            if who == place
        ]
        if window is not None:
            for what, peer, start, end in self._waits:
                if isinstance(what, Key):
                    notes.append(Note("", Lane.RECEIVE, start, end, positions[_receive_of(what)], peer))
                else:
                    notes.append(Note(str(what), Lane.WAIT, start, end, None, peer))
            notes += [Note(name, Lane.COLLECTIVE, start, end) for name, start, end in self._beside]
            ends = [note.end for note in notes] + [each.end for each in seen]
            window = (window[0], max(window[1], *ends, window[0]))
            if data_wait > 0:
                window = (window[0] - data_wait, window[1])
                notes.append(Note("batch", Lane.DATA, window[0], window[0] + data_wait))
            seen = [each._replace(start=max(each.start, window[0])) for each in seen if each.end > window[0]]
        return RankNotes(place, window, notes, list(holdings), list(traffic), seen if window is not None else [])

    def take(self, rank: int, told: RankNotes) -> None:
        """Take in what a rank of the world has told."""
        self._told[rank] = told

    def trace(self) -> Trace:
        """What was told, from 0 seconds on. What events hold is counted in microbatch-stages, as in a simulation."""
        ranks = [self._told[rank] for rank in sorted(self._told)]
        windows = tuple(told.window for told in ranks if told.window is not None)
        starts = [note.start for told in ranks for note in told.notes] + [start for start, _ in windows]
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
        # Waits for the same thing are numbered, so that those of several ranks are found to belong together.
        numbers: Counter[tuple[Lane, str]] = Counter()
        events = []
        for note in sorted(told.notes, key=lambda note: (note.start, -note.end)):
            name, stage, microbatch = note.name, -1, numbers[note.lane, note.name]
            peer, change = note.peer, (0.0, 0.0)
            if note.position is None:
                numbers[note.lane, note.name] += 1
            else:
                instruction = order[note.position]
                name, stage, microbatch = str(instruction), instruction.stage, instruction.microbatch
                if note.lane is LANES[instruction.kind]:
                    change = held(instruction)
                if instruction.peer is not None and instruction.kind in SENDS | RECEIVES:
                    peer = pipeline[self._schedule.placement.ranks[instruction.peer]]
            times = note.start - zero, note.end - zero
            events.append(Event(name, rank, note.lane, *times, stage, microbatch, *change, None, peer))
        return events

    def pipeline_of(self, rank: int) -> Sequence[int]:
        """The ranks, in the world, of the pipeline that a rank is of."""
        return next(ranks for ranks in self.pipelines if rank in ranks)

    def _linked(self, events: list[Event]) -> list[Event]:
        """Say of each event what let it start: of a receive its send, of all else what the rank did before it."""
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
    """The instruction that waits for a message."""
    kind = Kind.RECV_F if message.kind == "F" else Kind.RECV_B
    return Instruction(kind, message.reader, message.microbatch, message.maker)


def _sending(receive: str) -> str:
    """`0SEND_F2>1` for `1RECV_F2<0`."""
    reader, _, rest = receive.partition("RECV_")
    value, _, maker = rest.partition("<")
    return f"{maker}SEND_{value}>{reader}"
