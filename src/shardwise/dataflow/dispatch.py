"""Takes tasks in and puts each behind what it depends on. It waits for nothing but what a person asks to see.

What a task waits for follows from the data (`data.py`), copy by copy at its own place:

    it reads    the copy's writer: the task or the transfer that made it          read after write
    it writes   that, and whoever still copies from there                         write after write, after read

Tasks of one place run in one stream, so among themselves they are in order anyway. A writer at another place has a
buffer of its own to write to: it waits for no reader of this one.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.dataflow.assembly import Budget, MakeStream, make_places
from shardwise.dataflow.blame import blame_task
from shardwise.dataflow.choice import Chooser
from shardwise.dataflow.cuda import CudaStream
from shardwise.dataflow.data import Copy, Data
from shardwise.dataflow.imports import Imports, home_of
from shardwise.dataflow.journal import Journal, Work
from shardwise.dataflow.launch import Call, Launch, by_position, set_accesses
from shardwise.dataflow.links import GivenLinks, Routes
from shardwise.dataflow.mistakes import PLAIN, check_call
from shardwise.dataflow.mover import CHUNK_BYTES, Mover
from shardwise.dataflow.place import Place, check_names, default_names
from shardwise.dataflow.streams import Event, Failures, Run, ThreadStream
from shardwise.errors import ShardwiseError, unknown
from shardwise.trace.events import Lane


class Dispatcher:
    """Places, the data at them, and the tasks that run there."""

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        budget: Budget | None = None,
        eviction: str = "lru",
        links: GivenLinks | None = None,
        disk: Path | str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        trace: bool = False,
        make_stream: MakeStream = ThreadStream,
    ) -> None:
        names = default_names() if devices is None else list(devices)
        check_names(names)
        folder = None if disk is None else Path(disk)
        if folder is not None and not folder.is_dir():
            raise ShardwiseError(f"there is no folder {folder} to spill to", remedy=f"mkdir -p {folder}")
        self.failures = Failures()
        self.position = (0, 0)  # Where the running program is, and how long it is.
        self.places = make_places(
            names,
            budget=budget or {},
            eviction=eviction,
            position=lambda: self.position,
            disk=folder,
            failures=self.failures,
            make_stream=make_stream,
            times=trace,
        )
        self.place_names: Sequence[str] = [place.name for place in self.places]
        journal = Journal(is_reckoned=links is not None) if trace or links is not None else None
        self.mover = Mover(self.places, Routes(self.places, links), journal, chunk_bytes)
        self.host = self.places[-2]
        self.calls: list[Call] | None = None  # Kept while somebody wants to know what was submitted.
        self.first_values: dict[Data, Tensor] | None = None  # Of data that are given, kept while a check wants them.
        self._by_name = {place.name: place for place in self.places}
        # GPUs at which nothing is to be evicted or noted: the index of each, and its stream.
        self._quick = {
            place.name: (place.index, place.compute)
            for place in self.places
            if isinstance(place.compute, CudaStream) and place.memory.budget_bytes is None and journal is None
        }
        self._launches: dict[Any, Launch] = {}
        self.imports = Imports(self.places)
        self._chooser = Chooser(self.mover)
        self._forgotten: deque[list[Copy | None]] = deque()
        self._known: weakref.WeakSet[Data] = weakref.WeakSet()
        self._num_data = 0
        self._is_closed = False

    def data(self, tensor: Tensor, *, name: str | None = None, on_disk: bool = False) -> Data:
        """Take a tensor in. Its memory is used as it is; read it again through `Data.get`.

        One that is `on_disk` is a file mapped into memory, such as safetensors: a thread reads it ahead of its use.
        """
        found = self.imports.find(tensor)
        if found is not None:
            return found
        made = self._made(tensor, name)
        self.imports.add(made, tensor, on_disk=on_disk)
        if self.first_values is not None:
            self.first_values[made] = tensor.detach().cpu().clone()
        return made

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, name: str | None = None) -> Data:
        """Data without a value, and without memory until a task writes it."""
        return self._made(torch.empty(tuple(shape), dtype=dtype, device="meta"), name)

    def submit(
        self,
        fn: Callable[..., Any],
        *args: Any,
        grid: Any = None,
        place: str = "auto",
        reads: Sequence[Data] | None = None,
        writes: Sequence[Data] | None = None,
        into: Data | Sequence[Data] = (),
        seconds: float | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        """Have a Triton kernel (with its `grid`), a torch function, a module or a host function run at a place.

        Data among the arguments arrive as tensors of that place. `reads` and `writes` say what the task does with them;
        a kernel's source says it by itself. What is in `writes` and not in `reads` is overwritten whole. `into` takes
        what a function returns. `seconds` is what the task takes where time is reckoned.
        """
        launch = self._launches.get(fn)
        if launch is None:
            launch = Launch(fn)
            # A function may be made anew for each task, and hold whatever it likes: it is not kept.
            if launch.is_kernel or launch.is_module:
                self._launches[fn] = launch
        is_plain = reads is None and writes is None and seconds is None and name is None and self.calls is None
        if is_plain and launch.positions is not None and self._put_quickly(launch, args, options, grid, place):
            return
        if launch.is_kernel:
            args, options = by_position(launch, args, options)
        frame = sys._getframe(1)
        call = Call(launch, args, options, grid, place, frame.f_code, frame.f_lineno)
        call.seconds = seconds
        if name is not None:
            call.name = name
        if into != ():
            call.into = (into,) if isinstance(into, Data) else tuple(into)
        if launch.is_module:
            call.members = self._members(launch)
        set_accesses(call, reads, writes)
        check_call(call, self)
        self.issue(call)

    def issue(self, call: Call) -> None:
        """Put a call behind what it depends on, at its place or the best one."""
        if self.failures.first is not None:
            raise self.failures.first
        if self._forgotten:
            self._drop_forgotten()
        if call.place == "auto":
            place = self._chooser.choose(call)
        else:
            place = self._by_name.get(call.place) or self.place(call.place)
        if self.calls is not None:
            call.place = place.name  # A program runs where it first ran.
            self.calls.append(call)
        if place.memory.budget_bytes is None:
            self._put(call, place, self._gather(call, place))
            return
        held: list[Copy] = []
        try:
            for data in (*call.reads, *call.writes):
                copy = data.copies[place.index]
                if copy is not None:
                    _hold(copy, held)
                    place.memory.policy.touch(copy)
            after = self._gather(call, place, held)
            self._put(call, place, after)
        finally:
            for copy in held:
                copy.held -= 1

    def get(self, data: Data) -> Tensor:
        """Wait for a value and return it on the host: the tensor that was given, else a new one."""
        if self.calls is not None:
            raise ShardwiseError(
                f"{data.name}.get() is asked for inside of a program that is being recorded",
                remedy="get() after the program has run",
            )
        self._drop_forgotten()
        self._raise_failure()
        home = home_of(data)
        copy = self.mover.fetch(data, self.host if home is None else self.places[home.place])
        copy.check_unchanged(data.name)
        if copy.writer is not None:
            self._wait_for(copy.writer)
        self._raise_failure()
        self.imports.changed.pop(data.number, None)
        return copy.tensor.clone() if copy.imported is None else copy.imported

    def set(self, data: Data, tensor: Tensor) -> None:
        """Give data a new value."""
        if tuple(tensor.shape) != data.shape or tensor.dtype != data.dtype:
            raise ShardwiseError(
                f"{data.name} is {list(data.shape)} of {data.dtype}, but the new value is {list(tensor.shape)} of"
                f" {tensor.dtype}",
                remedy=f"machine.data(tensor), for a value that is not like {data.name}",
            )
        self.imports.renew(data, tensor)
        value = tensor.detach().to("cpu", copy=True)
        self.submit(_assign, data, value, place="host", writes=[data], name=f"{data.name}.set")

    def wait(self) -> None:
        """Wait until everything submitted is done, and raise what failed."""
        for place in self.places:
            for stream in (place.compute, place.inward, place.outward):
                if stream.last is not None:
                    self._wait_for(stream.last)
        self._raise_failure()

    def place(self, name: str) -> Place:
        """A place by its name."""
        if name not in self._by_name:
            raise unknown("place", name, self.place_names)
        return self._by_name[name]

    def all_data(self) -> list[Data]:
        """All data that somebody still has, in the order in which they were made."""
        return sorted(self._known, key=lambda data: data.number)

    def forget(self, data: Data) -> None:
        """Nobody will ask for the data again. May be called by any thread: the next task gives the memory back."""
        if not self._is_closed:
            self._forgotten.append(data.copies)

    def close(self) -> None:
        """Write values back to the tensors that were given, wait, and end the machine's threads."""
        if self._is_closed:
            return
        try:
            if self.failures.first is None:
                for data in list(self.imports.changed.values()):
                    self.get(data)
                self.wait()
        finally:
            self._is_closed = True
            self.failures.note(ShardwiseError("the machine is closed", remedy="get() and submit() before close()"))
            for place in self.places:
                for stream in (place.compute, place.inward, place.outward):
                    stream.close()
                place.memory.close()
            self.imports.close()

    def _put_quickly(
        self, launch: Launch, args: tuple[Any, ...], options: dict[str, Any], grid: Any, name: str
    ) -> bool:
        """Launch a kernel all of whose data are at its GPU already, and say whether that was so.

        It is what `issue` does, without what it would find nothing to do for: launches of small kernels are as long as
        a kernel itself.
        """
        found = self._quick.get(name)
        if found is None or grid is None or self._forgotten:
            return False
        if self.mover.tape is not None or self.failures.first is not None:
            return False
        stores = launch.stores
        if len(args) > len(stores):
            return False
        index, stream = found
        tensors, after, read, written = list(args), [], [], []
        for position, value in enumerate(args):
            if type(value) is not Data:
                if type(value) not in PLAIN:
                    return False
                continue
            copy = value.copies[index]
            if copy is None or not copy.valid or copy.imported is not None or value.keeper is not self:
                return False
            event = copy.writer
            if event is not None and event.stream is not stream:
                after.append(event)
            if stores[position]:
                if value.unwritable is not None:
                    return False
                written.append(value)
                if copy.copied:
                    after += copy.copied
            else:
                read.append(copy)
            tensors[position] = copy.tensor
        for option in options.values():
            if type(option) is Data:
                return False
        if not stream.can_issue(after):
            return False
        self.mover.num_changes += 1
        try:
            event = stream.launch(launch.run, tensors, options, grid, after)
        except Exception as error:
            frame = sys._getframe(2)
            raise blame_task(launch.kernel, launch.kernel, name, frame.f_code, frame.f_lineno, error) from error
        for copy in read:
            copy.reader = event
        for data in written:
            self._note_written(data, index, event)
        return True

    def _gather(self, call: Call, place: Place, held: list[Copy] | None = None) -> list[Event]:
        """Have every value that a call reads and room for every one that it writes; return what it waits for."""
        stream, index, mover = place.compute, place.index, self.mover
        # In its own stream a task is in order anyway, but a report wants to know what it depends on.
        is_noted = mover.journal is not None
        after: list[Event] = []
        for data in call.reads:
            copy = data.copies[index]
            if copy is None or not copy.valid:
                copy = mover.fetch(data, place)
                if held is not None:
                    _hold(copy, held)
            elif copy.imported is not None:
                copy.check_unchanged(data.name)
            event = copy.writer
            if event is not None and (is_noted or event.stream is not stream):
                after.append(event)
        for data in call.writes:
            copy = data.copies[index]
            if copy is None:
                copy = mover.buffer(data, place)
                if held is not None:
                    _hold(copy, held)
            event = copy.writer
            if event is not None and event.stream is not stream:
                after.append(event)
            if copy.copied:
                after += copy.copied
        return after

    def _put(self, call: Call, place: Place, after: list[Event]) -> None:
        """Put a call into its place's stream, and note what has become of the data."""
        stream, index, mover = place.compute, place.index, self.mover
        run = call.bind(index)
        if place is self.host and mover.tape is None:
            # Users' tensors lie there, and until a thread comes to this one they are in reach of everybody.
            copies = [(data.name, data.copies[index]) for data in call.reads]
            guards = [found for name, copy in copies if copy is not None and (found := copy.guard(name)) is not None]
            run = _guarded(run, guards) if guards else run
        if call.place == "auto":
            run = self._chooser.measured(call, place, run)
        # The call itself is not kept: data live as long as their user wants, not until a thread has got that far.
        blame = partial(blame_task, call.name, call.launch.kernel, place.name, call.code, call.line)
        if mover.journal is None and mover.tape is None:
            mover.num_changes += 1
            event = stream.put(run, after, blame)
        else:
            work = Work(name=call.name, lane=Lane.COMPUTE, place=index, seconds=call.seconds or 0.0)
            event = mover.put(stream, run, after, blame, work)
        for data in call.reads:
            data.copies[index].reader = event  # type: ignore[union-attr]
        for data in call.writes:
            self._note_written(data, index, event)

    def _note_written(self, data: Data, index: int, event: Event) -> None:
        """A place's copy has the value from now on, and no other has."""
        for copy in data.copies:
            if copy is not None:
                if copy.place == index:
                    copy.written(event)
                else:
                    copy.valid = False
        if data.is_imported:
            self.imports.changed[data.number] = data

    def _made(self, like: Tensor, name: str | None) -> Data:
        self._num_data += 1
        made = Data(self, name or f"data{self._num_data}", self._num_data, like)
        self._known.add(made)
        return made

    def _members(self, launch: Launch) -> dict[str, Data]:
        """A module's parameters and buffers as data: the same each time, for they are the same tensors."""
        if launch.members is None:
            tensors = {**dict(launch.fn.named_parameters()), **dict(launch.fn.named_buffers())}
            launch.members = {name: self.data(tensor, name=name) for name, tensor in tensors.items()}
        return launch.members

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            for copy in self._forgotten.popleft():
                if copy is not None:
                    self.mover.drop(copy)

    def _wait_for(self, event: Event) -> None:
        event.wait()
        if self.mover.journal is not None:
            self.mover.journal.host_waited(event)

    def _raise_failure(self) -> None:
        if self.failures.first is not None:
            raise self.failures.first


def _hold(copy: Copy, held: list[Copy]) -> None:
    copy.held += 1
    held.append(copy)


def _guarded(run: Run, guards: Sequence[Run]) -> Run:
    def guarded() -> None:
        for guard in guards:
            guard()
        run()

    return guarded


def _assign(target: Tensor, value: Tensor) -> None:
    target.copy_(value)
