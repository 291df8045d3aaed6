"""Accept tasks and put each behind its dependencies. The host waits only when a user asks for a value.

submit      determine what the task is, and what it reads and writes                        `launch.py`
issue       choose the place, if the user names none                                        `choice.py`
_gather     fetch the inputs, make room for the outputs, collect the events to wait for     `mover.py`
_put        put the task into its place's stream, and note which copies it reads and writes

Dependencies follow from the data (`data.py`), copy by copy at the task's own place:

    a read waits for     the copy's writer: the task or the transfer that made it       read after write
    a write waits for    that, and transfers that still read the copy                   write after write, after read

Tasks of one place run in one stream, so they are already ordered among themselves. A writer at another place writes to
a buffer of its own, so it does not wait for readers of this one.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.dataflow.choice import Chooser
from shardwise.dataflow.cuda import CudaStream
from shardwise.dataflow.data import Copy, Data, run_guarded
from shardwise.dataflow.journal import Journal, Work
from shardwise.dataflow.launch import Call, Launch, by_position, set_accesses
from shardwise.dataflow.links import GivenLinks, Routes
from shardwise.dataflow.mover import CHUNK_BYTES, Mover
from shardwise.dataflow.place import Budget, MakeStream, Place, make_places
from shardwise.dataflow.store import Store
from shardwise.dataflow.streams import Event, Failures, Stream, ThreadStream
from shardwise.dataflow.task_errors import PLAIN, blame_task, check_call, compiled_on_cpu
from shardwise.errors import ShardwiseError
from shardwise.trace.events import Lane


class Dispatcher(Store):
    """Submits tasks to the places of a machine."""

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
        failures = Failures()
        self.position = (0, 0)  # The position in the running program, and the program's length.
        places = make_places(
            devices,
            budget=budget or {},
            eviction=eviction,
            position=lambda: self.position,
            disk=disk,
            failures=failures,
            make_stream=make_stream,
            times=trace,
        )
        journal = Journal(is_reckoned=links is not None) if trace or links is not None else None
        super().__init__(places, Mover(places, Routes(places, links), journal, chunk_bytes), failures)
        self._launches: dict[Any, Launch] = {}
        self._chooser = Chooser(self.mover)
        #: GPUs at which kernels may be launched directly: without a budget nothing is evicted, and no journal records.
        self._direct = {
            place.name: (place.index, place.compute)
            for place in self.places
            if isinstance(place.compute, CudaStream) and place.memory.budget_bytes is None and journal is None
        }

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
        """Run a Triton kernel (with its `grid`), a torch function, a module or a host function at a place.

        Data among the arguments arrive as tensors at that place. `reads` and `writes` say how the task uses them; for a
        kernel they are found in its source. Data in `writes` but not in `reads` are overwritten completely. `into`
        receives what a function returns. `seconds` is how long the task takes where time is simulated.
        """
        launch = self._launches.get(fn)
        if launch is None:
            launch = Launch(fn)
            # A plain function may be created anew for each task and close over large objects: do not cache it.
            if launch.is_kernel or launch.is_module:
                self._launches[fn] = launch
        is_plain = reads is None and writes is None and seconds is None and name is None and self.calls is None
        is_plain = is_plain and launch.positions is not None and not self._forgotten and self.failures.first is None
        if is_plain and self._launch_directly(launch, args, options, grid, place):
            return
        if launch.is_kernel:
            args, options = by_position(launch, args, options)
        frame = sys._getframe(1)
        called = launch.kernel if name is None else name
        call = Call(launch, args, options, grid, place, frame.f_code, frame.f_lineno, called, seconds)
        if into != ():
            call.into = (into,) if isinstance(into, Data) else tuple(into)
        if launch.is_module:
            call.members = self._members(launch)
        set_accesses(call, reads, writes)
        check_call(call, self)
        self.issue(call)

    def _launch_directly(
        self, launch: Launch, args: tuple[Any, ...], options: dict[str, Any], grid: Any, name: str
    ) -> bool:
        """Launch a kernel directly if all of its data are at its GPU already. Returns whether it was launched.

        This follows the same rule as `issue` but skips the steps that have nothing to do, because the overhead of
        submitting a small kernel is as long as the kernel itself. The task's source line is two frames up.
        """
        found = self._direct.get(name)
        if found is None or grid is None or self.mover.tape is not None:
            return False
        stores = launch.stores
        if len(args) > len(stores):
            return False
        index, stream = found
        tensors: list[Any] = list(args)
        after: list[Event] = []
        read: list[Copy] = []
        written: list[Data] = []
        for position, value in enumerate(args):
            if type(value) is not Data:
                if type(value) not in PLAIN:
                    return False
                continue
            copy = value.copies[index]
            if copy is None or not copy.valid or copy.imported is not None or value.keeper is not self:
                return False
            if stores[position]:
                if value.unwritable is not None:
                    return False
                written.append(value)
            else:
                read.append(copy)
            _add_dependencies(copy, stream, after, stores[position])
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
        _note_task(event, index, read, written, self.imports.changed)
        return True

    def issue(self, call: Call) -> None:
        """Put a call behind its dependencies, at its place or at the best one."""
        if self.failures.first is not None:
            raise self.failures.first
        if self._forgotten:
            self._drop_forgotten()
        if call.place == "auto":
            place = self._chooser.choose(call)
        else:
            place = self._by_name.get(call.place) or self.place(call.place)
        if call.launch.is_kernel and not call.launch.is_interpreted and place.device.type == "cpu":
            raise compiled_on_cpu(call, place.name)
        if self.calls is not None:
            call.place = place.name  # A program replays a task where it ran first.
            self.calls.append(call)
        if place.memory.budget_bytes is None:
            self._put(call, place, *self._gather(call, place))
            return
        held: list[Copy] = []
        try:
            for data in (*call.reads, *call.writes):
                copy = data.copies[place.index]
                if copy is not None:
                    _hold(copy, held)
                    place.memory.policy.touch(copy)
            self._put(call, place, *self._gather(call, place, held))
        finally:
            for copy in held:
                copy.held -= 1

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

    def _gather(self, call: Call, place: Place, held: list[Copy] | None = None) -> tuple[list[Event], list[Copy]]:
        """Fetch every value that a call reads, and make room for every value that it writes.

        Returns the events that the call waits for, and the copies that it reads.
        """
        stream, index, mover = place.compute, place.index, self.mover
        # Tasks of one stream are ordered anyway, but a report needs the dependencies between them too.
        is_noted = mover.journal is not None
        after: list[Event] = []
        read: list[Copy] = []
        for data in call.reads:
            copy = data.copies[index]
            if copy is None or not copy.valid:
                copy = mover.fetch(data, place)
                if held is not None:
                    _hold(copy, held)
            elif copy.imported is not None:
                copy.check_unchanged(data.name)
            _add_dependencies(copy, stream, after, False, is_noted)
            read.append(copy)
        for data in call.writes:
            copy = data.copies[index]
            if copy is None:
                copy = mover.buffer(data, place)
                if held is not None:
                    _hold(copy, held)
            _add_dependencies(copy, stream, after, True)
        return after, read

    def _put(self, call: Call, place: Place, after: list[Event], read: list[Copy]) -> None:
        """Put a call into its place's stream, and update the states of its data."""
        stream, index, mover = place.compute, place.index, self.mover
        run = call.bind(index)
        if place is self.host and mover.tape is None:
            # Users' tensors live here, and user code may modify them before the thread gets to this task.
            copies = zip(call.reads, read, strict=True)
            guards = [found for data, copy in copies if (found := copy.guard(data.name)) is not None]
            run = partial(run_guarded, run, guards) if guards else run
        if call.place == "auto":
            run = self._chooser.measured(call, place, run)
        # Keep no reference to the call itself: data live as long as the user keeps them, not until a thread gets here.
        blame = partial(blame_task, call.name, call.launch.kernel, place.name, call.code, call.line)
        if mover.journal is None and mover.tape is None:
            mover.num_changes += 1
            event = stream.put(run, after, blame)
        else:
            work = Work(name=call.name, lane=Lane.COMPUTE, place=index, seconds=call.seconds or 0.0)
            event = mover.put(stream, run, after, blame, work)
        _note_task(event, index, read, call.writes, self.imports.changed)

    def _members(self, launch: Launch) -> dict[str, Data]:
        """Return a module's parameters and buffers as data: the same data each time, as the tensors are the same."""
        if launch.members is None:
            tensors = {**dict(launch.fn.named_parameters()), **dict(launch.fn.named_buffers())}
            launch.members = {name: self.data(tensor, name=name) for name, tensor in tensors.items()}
        return launch.members


def _add_dependencies(copy: Copy, stream: Stream, after: list[Event], writes: bool, in_order_too: bool = False) -> None:
    """Add the events that a task of a stream waits for before it reads or writes a copy.

    `in_order_too` also adds a writer of the same stream, because a report needs every dependency.
    """
    event = copy.writer
    if event is not None and (in_order_too or event.stream is not stream):
        after.append(event)
    if writes and copy.copied:
        after += copy.copied


def _note_task(
    event: Event, place: int, reads: Iterable[Copy], writes: Iterable[Data], changed: dict[int, Data]
) -> None:
    """Note the copies that a task reads and writes, where `event` is its end. A written copy is the only valid one.

    `changed` collects data of users' tensors whose new value is elsewhere.
    """
    for copy in reads:
        copy.reader = event
    for data in writes:
        for each in data.copies:
            if each is not None:
                if each.place == place:
                    each.written(event)
                else:
                    each.valid = False
        if data.is_imported:
            changed[data.number] = data


def _hold(copy: Copy, held: list[Copy]) -> None:
    copy.held += 1
    held.append(copy)


def _assign(target: Tensor, value: Tensor) -> None:
    target.copy_(value)
