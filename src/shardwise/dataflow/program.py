"""A program: tasks recorded once and replayed without repeating the dispatcher's decisions. It has one of three kinds:

    graphs    a CUDA graph for each segment of a GPU's work, with events between them
    list      the steps as they were put into the streams, put again; also without a GPU
    tasks     the tasks, dispatched anew: where memory is short, evictions differ between replays

The first two need every buffer to stay where it is, so a program holds its buffers until it is closed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.dataflow.data import Copy, Data
from shardwise.dataflow.dispatch import Dispatcher
from shardwise.dataflow.graphs import Graphs, Relaunch
from shardwise.dataflow.launch import Call
from shardwise.dataflow.mover import Mover, Step, UnfixedError
from shardwise.dataflow.streams import Event, Stream, latest
from shardwise.errors import ShardwiseError


@dataclass(frozen=True, slots=True)
class _Left:
    """The state of a copy after a replay: whether it is valid, and the steps that last wrote, read and copied it."""

    copy: Copy
    valid: bool
    writer: int | None
    reader: int | None
    copied: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fixed:
    """A program whose steps are the same in every replay."""

    steps: list[Step]
    needs: list[tuple[Data, Copy]]
    left: list[_Left]
    num_transfers: int


class Program:
    """Recorded tasks that can be replayed any number of times."""

    def __init__(self, machine: Dispatcher, calls: list[Call]) -> None:
        self._machine = machine
        self._calls = calls
        self._data = list(dict.fromkeys(data for call in calls for data in (*call.reads, *call.writes)))
        self._written = [data for data in self._data if any(data in call.writes for call in calls)]
        self._written_imported = [data for data in self._written if data.is_imported]
        self._fixed = _fix(machine, calls, self._data)
        self._graphs: Graphs | None = None
        self._relaunch: Relaunch | None = None  # The short path, for a replay right after another one.
        self.kind = "tasks" if self._fixed is None else "list"
        #: The error that kept the steps from being captured as graphs, if any.
        self.problem: Exception | None = None
        if self._fixed is not None:
            for left in self._fixed.left:
                left.copy.held += 1
            if machine.mover.journal is None and any(hasattr(step.stream, "cuda") for step in self._fixed.steps):
                self._capture(self._fixed)

    @property
    def num_tasks(self) -> int:
        """How many tasks one replay runs."""
        return len(self._calls)

    def replay(self) -> None:
        """Run all tasks again. The host does not wait."""
        if self._relaunch is None or not self._relaunch.run():
            self._replay()
        if self._fixed is not None:
            self._machine.mover.num_transfers += self._fixed.num_transfers
        for data in self._written_imported:
            self._machine.imports.changed[data.number] = data

    def close(self) -> None:
        """Release the buffers."""
        if self._fixed is not None:
            for left in self._fixed.left:
                left.copy.held -= 1
        self._fixed, self._graphs, self._relaunch, self.kind = None, None, None, "tasks"

    def _capture(self, fixed: _Fixed) -> None:
        self._machine.wait()  # No other work may be issued to the GPU during a capture.
        try:
            self._graphs = Graphs(fixed.steps, self._machine.mover)
            self.kind = "graphs"
        except (RuntimeError, ShardwiseError) as error:
            # For instance, a task that reads a value on the host cannot be captured. A list can still replay it.
            self.problem = error

    def _dispatch(self) -> None:
        machine = self._machine
        uses: dict[Data, list[int]] = {data: [] for data in self._data}
        for position, call in enumerate(self._calls):
            for data in (*call.reads, *call.writes):
                uses[data].append(position)
        for data, positions in uses.items():
            data.uses = tuple(positions)
        for position, call in enumerate(self._calls):
            machine.position = (position, len(self._calls))
            machine.issue(call)

    def _replay(self) -> None:
        """Replay with all checks: fetch what other tasks have changed since the last replay."""
        machine, fixed = self._machine, self._fixed
        if machine.failures.first is not None:
            raise machine.failures.first
        if fixed is None:
            self._dispatch()
            return
        for data, copy in fixed.needs:
            copy.check_unchanged(data.name)
        self._put(fixed)
        if self._graphs is not None:
            self._relaunch = self._graphs.relaunch(machine.failures, [copy for _, copy in fixed.needs])

    def _put(self, fixed: _Fixed) -> None:
        """Fetch missing inputs, put the steps, and set the states of all copies as the steps leave them."""
        mover = self._machine.mover
        for data, copy in fixed.needs:
            if not copy.valid:
                mover.fetch(data, mover.places[copy.place])
        start = latest([event for left in fixed.left for event in left.copy.busy_until()])
        events = _put_steps(fixed, start, mover) if self._graphs is None else self._graphs.launch(start)
        for data in self._written:
            # Copies made since the recording hold values that are now overwritten.
            for each in data.copies:
                if each is not None:
                    each.valid = False
        for left in fixed.left:
            copy = left.copy
            if left.writer is not None:
                copy.written(events[left.writer])
            if left.reader is not None:
                copy.reader = events[left.reader]
            for step in left.copied:
                copy.add_copied(events[step])
            copy.valid = left.valid


def record(machine: Dispatcher, fn: Callable[[], object]) -> Program:
    """Run a function once and keep the tasks that it submits."""
    if machine.calls is not None:
        raise ShardwiseError("a program is being recorded inside of another", remedy="one record() after the other")
    calls: list[Call] = []
    machine.calls = calls
    try:
        fn()
    finally:
        machine.calls = None
    if not calls:
        raise ShardwiseError("the recorded function submitted no task", remedy="machine.submit(...) inside of it")
    return Program(machine, calls)


def _fix(machine: Dispatcher, calls: list[Call], used: list[Data]) -> _Fixed | None:
    """Find steps that leave the validity of every copy as they found it, so that they can be replayed. None if there
    are none, or if memory is short.

    The tasks are dispatched onto a tape. If the copies end in another state than they began in, this is repeated once
    from the new state. A program whose states still differ then is dispatched anew in each replay.
    """
    mover = machine.mover
    copies = [copy for data in used for copy in data.copies if copy is not None]
    saved = [(copy, copy.valid, copy.writer, copy.reader, copy.copied) for copy in copies]
    num_transfers = mover.num_transfers
    try:
        for _ in range(2):
            start = [copy.valid for copy in copies]
            for copy in copies:
                copy.writer, copy.reader, copy.copied = None, None, []
            mover.tape, mover.num_transfers = [], 0
            for call in calls:
                machine.issue(call)
            if [copy.valid for copy in copies] == start:
                return _Fixed(
                    steps=mover.tape,
                    needs=_needed(calls),
                    left=[_left_of(copy) for copy in copies],
                    num_transfers=mover.num_transfers,
                )
        return None
    except UnfixedError:
        return None
    finally:
        mover.tape, mover.num_transfers = None, num_transfers
        for copy, valid, writer, reader, copied in saved:
            copy.valid, copy.writer, copy.reader, copy.copied = valid, writer, reader, copied


def _needed(calls: list[Call]) -> list[tuple[Data, Copy]]:
    """Return the copies that must be valid before the first step: those of all data that are read before written."""
    needed: dict[Data, None] = {}
    made: set[Data] = set()
    for call in calls:
        needed |= dict.fromkeys(data for data in call.reads if data not in made)
        made |= set(call.writes)
    return [(data, copy) for data in needed for copy in data.valid_copies]


def _left_of(copy: Copy) -> _Left:
    return _Left(
        copy=copy,
        valid=copy.valid,
        writer=None if copy.writer is None else copy.writer.note,
        reader=None if copy.reader is None else copy.reader.note,
        copied=tuple(event.note for event in copy.copied),
    )


def _put_steps(fixed: _Fixed, start: list[Event], mover: Mover) -> list[Event]:
    """Put every step again. The first step of each stream waits for earlier users of the buffers."""
    events: list[Event] = []
    begun: set[Stream] = set()
    for step in fixed.steps:
        after = [events[each] for each in step.after if events[each].stream is not step.stream]
        if step.stream not in begun:
            begun.add(step.stream)
            after += [event for event in start if event.stream is not step.stream]
        events.append(mover.put(step.stream, step.run, after, step.blame, step.work))
    return events
