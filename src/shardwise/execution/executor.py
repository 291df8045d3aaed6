"""The common part of both executors: split a rank's list of one or several steps into one call per batch.

If the pipeline is not flushed between steps, the list of a rank continues from one batch into the next. With each batch
a rank runs its list up to the first forward of the next batch. The remaining instructions of a batch run with the next
batch, or when the pipeline is flushed. With 2 ranks and 2 microbatches a step:

                call 0         call 1            call 2               to empty it after call 1
    rank 0      F0 F1 B0       F2 B1 F3 B2       F4 B3 F5 B4          B3
    rank 1      F0 B0 F1 B1    F2 B2 F3 B3       F4 B4 F5 B5
"""

from collections.abc import Callable, Container, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from shardwise.errors import ShardwiseError
from shardwise.execution.interpreter import Interpreter, StageStates
from shardwise.execution.step_losses import Tally
from shardwise.schedule.instruction import COMPUTE, OFFLOADS, SENDS, Instruction, Kind
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Batch
from shardwise.torch_private import uncached_parametrizations

#: Called for each instruction that takes time: rank, instruction, start and end in seconds.
Record = Callable[[int, Instruction, float, float], None]

#: The kinds that are timed. A receive is not: its send delivers. Nor is STEP: all stages step after the executor.
TAKES_TIME = (COMPUTE | SENDS) - {Kind.STEP}
#: The kinds that an executor also runs if it has `StageStates` beside it.
RUN_BESIDE = frozenset({Kind.GATHER, Kind.RELEASE})


class Calls(NamedTuple):
    """For one rank and each step: the positions in its list that run with the batch, and those of a flush after it."""

    feeds: tuple[tuple[int, ...], ...]
    flushes: tuple[tuple[int, ...], ...]


def calls_of(schedule: Schedule, rank: int) -> Calls:
    """Divide a rank's list into calls. A schedule of one step is a single call with an empty flush."""
    feeds: list[list[int]] = [[] for _ in range(schedule.num_steps)]
    flushes: list[list[int]] = [[] for _ in range(schedule.num_steps)]
    begun = 0
    for position, instruction in enumerate(schedule.orders[rank]):
        own = _step_of(schedule, instruction)
        if instruction.kind is Kind.F:
            begun = max(begun, own)
        # A receive listed before its step's first forward is deferred to that step's call: the step may never be fed,
        # and then nothing is sent.
        call = max(begun, own)
        feeds[call].append(position)
        for step in range(own, call):
            flushes[step].append(position)
    return Calls(tuple(map(tuple, feeds)), tuple(map(tuple, flushes)))


def _step_of(schedule: Schedule, instruction: Instruction) -> int:
    """Return the step that an instruction belongs to."""
    if instruction.kind in (Kind.STEP, Kind.REDUCE):
        return instruction.microbatch
    if instruction.kind in (Kind.GATHER, Kind.RELEASE):
        return 0
    return schedule.step_of(instruction.microbatch)


class Executor:
    """Runs a complete schedule (`schedule.passes.lower`) on the interpreters of one rank or of all ranks.

    `_feeds` and `_flushes` hold, for each step, the instructions to walk with its batch and in a flush after it.
    """

    _feeds: Sequence[Any]
    _flushes: Sequence[Any]

    def __init__(
        self, schedule: Schedule, interpreters: list[Interpreter], known: Container[Kind], name: str,
        beside: StageStates | None,
    ) -> None:  # fmt: skip
        check_kinds(schedule, known, name, beside)
        self.schedule, self.interpreters, self._beside = schedule, interpreters, beside
        self._num_fed = 0

    @property
    def is_full(self) -> bool:
        """Whether all steps of the schedule have been fed, so that a flush must precede the next batch."""
        return self._num_fed == self.schedule.num_steps

    def run(self, microbatches: list[Batch], *, signature: Hashable = None, record: Record | None = None) -> Tally:
        """Run one step from beginning to end, and return the part of its loss that was measured here."""
        self._num_fed = 0
        tally = self.feed(microbatches, signature=signature, record=record)
        self.flush(record=record)
        return tally

    def feed(self, microbatches: list[Batch], *, signature: Hashable = None, record: Record | None = None) -> Tally:
        """Run the call of the next step's batch and return its loss. Batches between two flushes have one signature."""
        step = self._num_fed
        if step == 0:
            for interpreter in self.interpreters:
                interpreter.begin()
            self._begin(signature)
        for interpreter in self.interpreters:
            interpreter.take(step, microbatches)
        with uncached_parametrizations():
            self._walk(self._feeds[step], record)
        self._num_fed += 1
        total = Tally()
        for interpreter in self.interpreters:
            total.add(interpreter.losses.take(step))
        return total

    def flush(self, *, record: Record | None = None) -> None:
        """Run the remaining instructions of the steps that were fed, and wait until all messages have arrived."""
        with uncached_parametrizations():
            self._walk(self._flushes[self._num_fed - 1], record)
        self._num_fed = 0
        self._end()
        for interpreter in self.interpreters:
            interpreter.finish()

    def _begin(self, signature: Hashable) -> None:
        """Prepare for the first step after a flush: the pipeline is empty."""

    def _walk(self, what: Any, record: Record | None) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """Finish a flush: the pipeline is empty."""

    def _find_own(self, interpreter: Interpreter, instruction: Instruction) -> Callable[[], None] | None:
        """Return a function that runs an instruction; None for a transfer or an instruction with nothing to do."""
        kind, beside = instruction.kind, self._beside
        if kind in COMPUTE and kind is not Kind.STEP:
            if beside is None:
                return partial(interpreter.compute, instruction)
            return partial(_compute_beside, interpreter, instruction, beside)
        if kind in OFFLOADS:
            return partial(interpreter.move, instruction)
        if beside is not None and (kind in RUN_BESIDE or kind is Kind.REDUCE):
            return partial(getattr(beside, kind.lower()), instruction)
        return None


def _compute_beside(interpreter: Interpreter, instruction: Instruction, beside: StageStates) -> None:
    """Run a computation, notifying the `StageStates` before and after it."""
    for part in instruction.parts:
        beside.begin(part)
    interpreter.compute(instruction)
    for part in instruction.parts:
        beside.end(part)


def check_kinds(schedule: Schedule, known: Container[Kind], executor: str, beside: StageStates | None = None) -> None:
    """Refuse a schedule with an instruction that an executor does not run: skipping it would lose its results."""
    for order in schedule.orders:
        for instruction in order:
            if instruction.kind not in known and (beside is None or instruction.kind not in RUN_BESIDE):
                raise ShardwiseError(
                    f"{instruction} is an instruction that {executor} does not run",
                    remedy=f"the schedule {schedule.name} without {instruction.kind}",
                )
