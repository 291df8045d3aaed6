"""All ranks of a pipeline in one process, one instruction at a time: the definition of what a schedule means.

Ranks take turns. Each runs its list in order, as far as what its next computation needs is there; a send delivers at
once. Nothing here is fast, and nothing is left to rng: the other executors are held against it.
"""

from collections.abc import Callable, Hashable
from time import perf_counter

from shardwise.execution.compute_policy import ComputePolicy
from shardwise.execution.continuous_calls import calls_of
from shardwise.execution.interpreter import Interpreter, StageStates, Tally, check_kinds, compute_beside
from shardwise.execution.stage_io import cut_off
from shardwise.schedule.instruction import COMPUTE, OFFLOADS, RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Batch, Loss, Split

#: Called for each instruction that takes time: rank, instruction, start and end in seconds.
Record = Callable[[int, Instruction, float, float], None]

#: A send delivers what its receive would wait for; all stages step together, when the executor has finished.
TAKES_TIME = (COMPUTE | SENDS) - {Kind.STEP}


#: What it runs; and what there is nothing to do for, and why.
RUN = (COMPUTE - {Kind.STEP}) | SENDS | OFFLOADS
RUN_BESIDE = frozenset({Kind.GATHER, Kind.RELEASE})
LEFT = {
    Kind.RECV_F: "it is delivered with its send",
    Kind.RECV_B: "it is delivered with its send",
    Kind.STEP: "the engine steps for all stages at once",
    Kind.REDUCE: "without states beside it there is one replica, and tied parameters are one tensor",
}


class LocalExecutor:
    """Interprets a complete schedule (`schedule.passes.lower`) over the stages of a split module."""

    def __init__(
        self,
        schedule: Schedule,
        split: Split,
        loss: Loss,
        policy: ComputePolicy | None = None,
        *,
        beside: StageStates | None = None,
    ) -> None:
        known = RUN | LEFT.keys() if beside is None else RUN | LEFT.keys() | RUN_BESIDE
        check_kinds(schedule, known, "the executor of one process")
        self.schedule, self._beside = schedule, beside
        self.ranks = [Interpreter(rank, schedule, split, loss, policy) for rank in range(schedule.num_ranks)]
        self._needs = Needs(schedule)
        self._receive_of = {
            self._needs.before[node][0]: instruction
            for node, instruction in enumerate(self._needs.nodes)
            if instruction.kind in RECEIVES
        }

        self._calls = [calls_of(schedule, rank) for rank in range(schedule.num_ranks)]
        self._done: list[bool] = []
        self._num_fed = 0

    @property
    def is_full(self) -> bool:
        """Whether all steps of the schedule have been fed, so that the pipe must be emptied before the next."""
        return self._num_fed == self.schedule.num_steps

    @property
    def interpreters(self) -> list[Interpreter]:
        """Those of all ranks."""
        return self.ranks

    def run(self, microbatches: list[Batch], *, signature: Hashable = None, record: Record | None = None) -> Tally:
        """Run one step from beginning to end."""
        self._num_fed = 0
        tally = self.feed(microbatches, signature=signature, record=record)
        self.flush(record=record)
        return tally

    def feed(
        self,
        microbatches: list[Batch],
        *,
        signature: Hashable = None,  # noqa: ARG002 - nothing has to be agreed on
        record: Record | None = None,
    ) -> Tally:
        """Run what the next step's batch lets run (`continuous_calls.py`), and return that batch's loss."""
        step = self._num_fed
        if step == 0:
            self._done = [False] * len(self._needs.nodes)
            for interpreter in self.ranks:
                interpreter.begin()
        for interpreter in self.ranks:
            interpreter.take(step, microbatches)
        self._walk([calls.feeds[step] for calls in self._calls], record)
        self._num_fed += 1
        total = Tally()
        for interpreter in self.ranks:
            total.add(interpreter.tally(step))
        return total

    def flush(self, *, record: Record | None = None) -> None:
        """Run what is left of the steps that were fed."""
        self._walk([calls.flushes[self._num_fed - 1] for calls in self._calls], record)
        self._num_fed = 0
        for interpreter in self.ranks:
            interpreter.finish()

    def _walk(self, lists: list[tuple[int, ...]], record: Record | None) -> None:
        """Let ranks take turns until each has run its positions."""
        left = [list(reversed(positions)) for positions in lists]
        moved = True
        while moved:
            moved = False
            for rank, (order, positions) in enumerate(zip(self.schedule.orders, left, strict=True)):
                while positions and self._is_ready(rank, positions[-1]):
                    position = positions.pop()
                    node = self._needs.first_node[rank] + position
                    start = perf_counter()
                    self._do(rank, node)
                    if record is not None and order[position].kind in TAKES_TIME:
                        record(rank, order[position], start, perf_counter())
                    self._done[node] = True
                    moved = True
        assert not any(left), "a proven schedule does not get stuck"

    def _is_ready(self, rank: int, position: int) -> bool:
        """Whether an instruction may run. What runs beside computation is only issued here, so it always may.

        So is a STEP: the engine takes it when all that it needs has been run.
        """
        node = self._needs.first_node[rank] + position
        if self._needs.nodes[node].kind not in TAKES_TIME:
            return True
        return all(self._is_finished(need) for need in self._needs.before[node])

    def _is_finished(self, node: int) -> bool:
        """Whether what an instruction gives is there: for what runs beside computation, once its own needs are."""
        kind = self._needs.nodes[node].kind
        if kind in COMPUTE or kind in SENDS:
            return self._done[node]
        return all(self._is_finished(need) for need in self._needs.before[node])

    def _do(self, rank: int, node: int) -> None:
        instruction, interpreter = self._needs.nodes[node], self.ranks[rank]
        kind = instruction.kind
        if kind in COMPUTE and kind is not Kind.STEP:
            if self._beside is None:
                interpreter.compute(instruction)
            else:
                compute_beside(interpreter, instruction, self._beside)
        elif kind in SENDS:
            assert instruction.peer is not None, f"{instruction} names no peer"
            receiver = self.ranks[self.schedule.placement.ranks[instruction.peer]]
            sent = interpreter.io.sender(instruction)()
            receiver.receiver(self._receive_of[node])([cut_off(each) for each in sent])
        elif kind in OFFLOADS:
            interpreter.move(instruction)
        elif self._beside is not None and kind in (Kind.GATHER, Kind.RELEASE, Kind.REDUCE):
            getattr(self._beside, kind.lower())(instruction)
        else:
            assert kind in LEFT, f"{instruction} is not run"
