"""The operations that this process has issued so far, as a `Program`. `taps.py` and `copies.py` report them here.

Over gloo, the operations are those that the same code would issue to NCCL (`rehearsal.py`). With GPUs, they are those
issued to NCCL.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.nccl.program import COMPUTE, ENDS, HOST, Communicator, Event, Kind, Operation, Program, Span
from shardwise.nccl.touches import Memories
from shardwise.ranks.faults import Watch, default_store
from shardwise.torch_private import raw_stream

_PACKAGE = Path(__file__).parents[1]
#: Files that only forward operations of others.
_PASSING_ON = ("nccl/", "ranks/collectives.py", "ranks/backend_exchange.py", "ranks/outbox.py", "ranks/faults.py")


class Recorder:
    """The program of this process so far.

    `rehearses`: processes on CPUs stand for GPUs. Their groups count as NCCL's, and their tensors as a GPU's.
    """

    def __init__(self, *, rehearses: bool, limit_seconds: float) -> None:
        self.rehearses, self.limit = rehearses, timedelta(seconds=limit_seconds)
        self.events: list[Event] = []
        #: Touches that turned out to matter later, each with the number of events before it.
        self._earlier: list[tuple[int, Event]] = []
        #: What the next operations carry, if the code that issues them says so.
        self.carries = ""
        #: The current step, or the name of work outside of steps. The caller sets it.
        self.step: int | str | None = None
        self.watch: Watch | None = None
        self.stream = COMPUTE
        self.memories = Memories(self._touched, lambda: (len(self.events), self._stream()))
        world = tuple(range(dist.get_world_size()))
        self._communicators = {0: Communicator(number=0, members=world, name="the default group")}
        self._numbers = {_name_of(dist.group.WORLD): 0}
        self._backends: dict[int, tuple[Any, int]] = {}
        self._count = 0
        self._made = 0
        #: Above 0 within a call that is recorded as a whole, or that torch makes for itself.
        self._depth = 0
        self._objects = 0
        self._lines: dict[Any, str | None] = {}
        # A separate client of the store, as the watch has.
        self._store: Any = default_store().clone() if rehearses else None  # type: ignore[attr-defined]
        self._agreed: Counter[str] = Counter()
        # The n-th recording of a rank belongs with the n-th of the others.
        self._run = 0 if self._store is None else self._store.add(f"shardwise/nccl/runs/{dist.get_rank()}", 1)
        self._main_stream = None if rehearses else raw_stream(torch.cuda.current_device())

    def program(self, failure: str | None = None) -> Program:
        """Return the record so far."""
        self.memories.sweep()
        events, start = list[Event](), 0
        for place, event in sorted(self._earlier, key=lambda each: each[0]):
            events += [*self.events[start:place], event]
            start = place
        return Program(
            rank=dist.get_rank(),
            communicators=tuple(self._communicators.values()),
            events=(*events, *self.events[start:]),
            failure=failure,
        )

    def name(self, named: Sequence[tuple[str, dist.ProcessGroup]]) -> None:
        """Name communicators by their purpose. If there are several names for one, keep the first."""
        for name, handle in named:
            number = self._numbers.get(_name_of(handle))
            if number is not None and not self._communicators[number].name:
                known = self._communicators[number]
                self._communicators[number] = Communicator(
                    number=number, members=known.members, backend=known.backend, name=name
                )

    def listens(self) -> bool:
        """Return whether calls are recorded now."""
        return self._depth == 0

    def sees_touches(self) -> bool:
        """Return whether touches are recorded now. On a GPU other streams are not, as their waits are unknown."""
        return self._depth == 0 and self._stream() in (self.stream, COMPUTE)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record nothing within this context."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def objects(self) -> Iterator[None]:
        """Record transfers within this context as pickled objects, which go through the host."""
        self._objects += 1
        try:
            yield
        finally:
            self._objects -= 1

    def make(self, members: Sequence[int], backend: str) -> int:
        """Record the creation of a group. Return its number."""
        self._made += 1
        made = Communicator(number=self._made, members=tuple(sorted(members)), backend=backend)
        self._communicators[self._made] = made
        self._note(Kind.MAKE, communicator=made)
        return self._made

    def know_group(self, handle: Any, number: int) -> None:
        self._numbers[_name_of(handle)] = number

    def know_backend(self, backend: Any, handle: Any) -> None:
        if _name_of(handle) in self._numbers:
            self._backends[id(backend)] = (backend, self._numbers[_name_of(handle)])

    def number_of(self, handle: Any) -> int | None:
        """Return the number of a group or of a backend; None for one made before the recording."""
        known = self._backends.get(id(handle))
        return known[1] if known is not None else self._numbers.get(_name_of(handle))

    def members_of(self, number: int) -> tuple[int, ...]:
        return self._communicators[number].members

    def issue(self, operation: Operation, tensors: Sequence[tuple[Tensor, bool]]) -> int:
        """Record an operation. Tensors with True are written by it. Return its number."""
        self.memories.sweep()
        self._count += 1
        spans = self.memories.track(self._count, tensors)
        noted = replace(operation, spans=spans, carries=self.carries)
        self._note(Kind.ISSUE, number=self._count, operation=noted)
        return self._count

    def copy(self, stream: str, tensors: Sequence[tuple[Tensor, bool]], after: Sequence[int]) -> int:
        """Record a copy on a stream after others, or a mark if there are no tensors. Return its number."""
        self.memories.sweep()
        self._count += 1
        for tensor, writes in tensors:
            for kind, span, (place, used_on) in self.memories.take_latest(tensor, writes=writes):
                before = self.events[place - 1] if place else None
                step, at = (self.step, "") if before is None else (before.step, before.at)
                stream_of = HOST if self.memories.is_on_host(span) else used_on
                touch = Event(kind=kind, number=self._count, spans=(span,), stream=stream_of, step=step, at=at)
                self._earlier.append((place, touch))
        spans = self.memories.track(self._count, tensors)
        self._note(Kind.COPY, number=self._count, on=stream, spans=spans, after=tuple(after))
        return self._count

    def agree(self, operation: Operation) -> None:
        """Raise if another rank issues a different operation in this position, where gloo would abort the process.

        The first rank to arrive defines the operation. Sizes of an all-to-all may differ; gloo checks them itself.
        """
        if self._store is None:
            return
        members = " ".join(map(str, self.members_of(operation.communicator)))
        group = f"{operation.communicator} of {members}, {operation.on_host}"
        rank, told = dist.get_rank(), f"{operation.kind} {operation.dtype} {operation.reduction}"
        said = [(group, told if operation.sent else f"{told} {operation.count}")]
        if operation.transfers:
            said = [
                (f"{group} {rank if each.is_send else each.peer}>{each.peer if each.is_send else rank} {each.tag}",
                 f"{each.count} {each.dtype}")
                for each in operation.transfers
            ]  # fmt: skip
        for line, mine in said:
            self._agreed[line] += 1
            key = f"shardwise/nccl/{self._run}/{line}/{self._agreed[line]}"
            theirs = self._store.compare_set(key, "", mine).decode()
            if theirs != mine:
                raise RuntimeError(f"another rank asks for {theirs.strip()} in place of {mine.strip()}")

    def wait(self, number: int) -> None:
        """Record that later work on the stream comes after an operation."""
        self._note(Kind.WAIT, number=number)

    def know(self, number: int) -> None:
        """Record that the host has waited for the completion of an operation."""
        self._note(Kind.KNOWN, number=number)

    def see(self, number: int) -> None:
        """Record that the host has asked for the completion of an operation, and that it was complete."""
        self._note(Kind.SEEN, number=number)

    def is_on_host(self, number: int, tensor: Tensor | None) -> bool:
        """Return whether an operation is on host tensors, over gloo."""
        if self._communicators[number].backend == "gloo" or self._objects:
            return True
        return not self.rehearses and (tensor is None or tensor.device.type == "cpu")

    def _touched(self, kind: Kind, number: int, span: Span) -> None:
        self._note(kind, HOST if self.memories.is_on_host(span) else None, number=number, spans=(span,))

    def _note(self, kind: Kind, on: str | None = None, **fields: Any) -> None:
        if kind in ENDS:
            self.memories.sweep()
        at = "" if self.watch is None else str(self.watch.place)
        self.events.append(
            Event(kind=kind, stream=on or self._stream(), step=self.step, at=at, line=self._line(), **fields)
        )

    def _stream(self) -> str:
        if self._main_stream is not None:
            current = raw_stream(torch.cuda.current_device())
            return self.stream if current == self._main_stream else f"stream {current:x}"
        return self.stream

    def _line(self) -> str:
        """Return the innermost line of our source that issues the operation and does not only forward it."""
        frame: FrameType | None = sys._getframe(2)
        found = ""
        while frame is not None:
            name = self._lines.get(frame.f_code, "")
            if name == "":
                name = self._lines[frame.f_code] = _ours(frame.f_code.co_filename)
            if name is not None:
                if not name.startswith(_PASSING_ON):
                    return f"{name}:{frame.f_lineno}"
                found = found or (f"{name}:{frame.f_lineno}" if not name.startswith("nccl/") else "")
            frame = frame.f_back
        return found


def _ours(filename: str) -> str | None:
    path = Path(filename)
    return path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else None


def _name_of(handle: Any) -> str:
    return str(getattr(handle, "group_name", ""))


class RecordedWork:
    """A `Work` whose waits are recorded. That of a collective keeps its tensors (`held`) until then, as torch does with
    NCCL. That of a send or receive does not: the sender keeps the tensor."""

    def __init__(self, recorder: Recorder, works: Sequence[Any], number: int, held: Sequence[Tensor] = ()) -> None:
        self._recorder, self._works, self._number = recorder, [each for each in works if each is not None], number
        self._held = held

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._recorder.listens():
            self._recorder.wait(self._number)
        with self._recorder.silent():
            for each in self._works:
                if self._recorder.rehearses:
                    each.wait(self._recorder.limit)  # An operation that no rank matches times out.
                else:
                    each.wait() if timeout is None else each.wait(timeout)
        self._held = ()
        return True

    def is_completed(self) -> bool:
        is_over = all(each.is_completed() for each in self._works)
        if is_over:
            self._recorder.see(self._number)
        return is_over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._works[0], name)
