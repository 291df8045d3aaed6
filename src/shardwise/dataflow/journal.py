"""When each piece of work ran: the machine's clock, and notes for its report.

Where links are given, time is simulated ("reckoned") instead of measured: a task takes the seconds it was declared to
take, a copy takes what its link says, and each starts when its stream is free and its dependencies are over. The result
does not depend on the load of the computer, so two runs of one program give the same report. Otherwise time is
measured, by host threads or by a GPU's events.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from shardwise.dataflow.cuda import new_event
from shardwise.dataflow.streams import Blame, Event, Run, Stream
from shardwise.trace.events import Lane


@dataclass(slots=True, kw_only=True)
class Work:
    """A piece of work in a stream, as a report describes it. `peer` is the other place of a copy.

    A CUDA graph can hold tasks and copies between a GPU and pinned memory, but no other copies.
    """

    name: str
    lane: Lane
    place: int
    peer: int | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    fits_graph: bool = True


@dataclass(slots=True, kw_only=True)
class Note:
    """A note of submitted work: its dependencies and, once it has run, its start and end."""

    work: Work
    stream: str
    waits: tuple[int, ...]  # The notes of its dependencies.
    before: int  # The note of the previous work in its stream, or -1.
    start: float = 0.0
    end: float = 0.0
    events: list[Any] = field(default_factory=list)  # On a GPU: the device, and the events before and after.


class Journal:
    """Notes of all streams, in the order of submission."""

    def __init__(self, *, is_reckoned: bool) -> None:
        self.is_reckoned = is_reckoned
        self.notes: list[Note] = []
        self.now_seconds = 0.0  # The host's simulated time.
        self._zero = perf_counter()
        self._zero_events: dict[int, torch.cuda.Event] = {}

    def put(self, stream: Stream, run: Run, after: Sequence[Event], blame: Blame, work: Work) -> Event:
        """Put work into a stream, and note it."""
        waits = tuple(each.note for each in after if each.note >= 0)
        before = -1 if stream.last is None else stream.last.note
        note = Note(work=work, stream=stream.name, waits=waits, before=before)
        if self.is_reckoned:
            note.start = max(self.now_seconds, stream.tail_seconds, *(each.end_seconds for each in after), 0.0)
            note.end = note.start + work.seconds
            event = stream.put(run, after, blame)
            stream.tail_seconds = event.end_seconds = note.end
        else:
            event = stream.put(self._timed(note, run, stream), after, blame)
        event.note = len(self.notes)
        self.notes.append(note)
        return event

    def host_waited(self, event: Event) -> None:
        """Advance the host's simulated time to an event that it has waited for: later work cannot start before."""
        self.now_seconds = max(self.now_seconds, event.end_seconds)

    def is_over(self, event: Event) -> bool:
        """Whether an event is reached at the host's simulated time."""
        return event.end_seconds <= self.now_seconds

    def settle(self) -> None:
        """Read the times of the GPUs' events. All work must be over."""
        for note in self.notes:
            if note.events:
                device, begin, end = note.events
                zero = self._zero_events[device]
                note.start, note.end = (zero.elapsed_time(each) / 1000 for each in (begin, end))
                note.events = []

    def _timed(self, note: Note, run: Run, stream: Stream) -> Run:
        cuda: torch.cuda.Stream | None = getattr(stream, "cuda", None)
        if cuda is None:

            def run_by_thread() -> None:
                note.start = perf_counter() - self._zero
                run()
                note.end = perf_counter() - self._zero

            return run_by_thread
        device = cuda.device_index
        if device not in self._zero_events:
            zero = self._zero_events[device] = new_event(times=True)
            zero.record(torch.cuda.current_stream(device))
            self._zero = perf_counter()

        def run_by_gpu() -> None:
            begin, end = (new_event(times=True) for _ in range(2))
            begin.record(cuda)
            run()
            end.record(cuda)
            note.events = [device, begin, end]

        return run_by_gpu
