"""All ranks of a pipeline in one process, one instruction at a time: the reference semantics of a schedule.

Ranks take turns. Each runs its list in order until its next computation lacks an input; a send delivers at once. This
executor is slow and deterministic: the other executors are tested against it.
"""

from collections.abc import Hashable
from time import perf_counter

from shardwise.execution.compute_policy import ComputePolicy
from shardwise.execution.executor import TAKES_TIME, Executor, Record, calls_of
from shardwise.execution.interpreter import Interpreter, StageStates
from shardwise.execution.stage_io import cut_off
from shardwise.schedule.instruction import COMPUTE, OFFLOADS, RECEIVES, SENDS, Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Loss, Split

#: The kinds that this executor runs; and those that need no action, with the reason.
RUN = (COMPUTE - {Kind.STEP}) | SENDS | OFFLOADS
LEFT = {
    Kind.RECV_F: "it is delivered with its send",
    Kind.RECV_B: "it is delivered with its send",
    Kind.STEP: "the engine steps for all stages at once",
    Kind.REDUCE: "without states beside it there is one replica, and tied parameters are one tensor",
}


class LocalExecutor(Executor):
    """Interprets a complete schedule over the stages of a split module, for all of its ranks."""

    def __init__(
        self,
        schedule: Schedule,
        split: Split,
        loss: Loss | None,
        policy: ComputePolicy | None = None,
        *,
        beside: StageStates | None = None,
    ) -> None:
        ranks = range(schedule.num_ranks)
        interpreters = [Interpreter(rank, schedule, split, loss, policy) for rank in ranks]
        super().__init__(schedule, interpreters, RUN | LEFT.keys(), "the executor of one process", beside)
        self._needs = Needs(schedule)
        self._receive_of = {
            self._needs.before[node][0]: instruction
            for node, instruction in enumerate(self._needs.nodes)
            if instruction.kind in RECEIVES
        }
        calls = [calls_of(schedule, rank) for rank in ranks]
        self._feeds = [[each.feeds[step] for each in calls] for step in range(schedule.num_steps)]
        self._flushes = [[each.flushes[step] for each in calls] for step in range(schedule.num_steps)]
        self._done: list[bool] = []

    def _begin(self, signature: Hashable) -> None:  # noqa: ARG002 - nothing has to be agreed on
        self._done = [False] * len(self._needs.nodes)

    def _walk(self, what: list[tuple[int, ...]], record: Record | None) -> None:
        """Let ranks take turns until each has run its positions."""
        left = [list(reversed(positions)) for positions in what]
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
        """Whether an instruction may run. One that runs beside computation is only issued here, so it always may.

        The same holds for STEP: the engine steps after everything that it needs has run.
        """
        node = self._needs.first_node[rank] + position
        if self._needs.nodes[node].kind not in TAKES_TIME:
            return True
        return all(self._is_finished(need) for need in self._needs.before[node])

    def _is_finished(self, node: int) -> bool:
        """Whether the result of an instruction is there. One beside computation has finished once its needs have."""
        kind = self._needs.nodes[node].kind
        if kind in COMPUTE or kind in SENDS:
            return self._done[node]
        return all(self._is_finished(need) for need in self._needs.before[node])

    def _do(self, rank: int, node: int) -> None:
        instruction, interpreter = self._needs.nodes[node], self.interpreters[rank]
        own = self._find_own(interpreter, instruction)
        if own is not None:
            own()
        elif instruction.kind in SENDS:
            assert instruction.peer is not None, f"{instruction} names no peer"
            receiver = self.interpreters[self.schedule.placement.ranks[instruction.peer]]
            sent = interpreter.io.sender(instruction)()
            receiver.receiver(self._receive_of[node])([cut_off(each) for each in sent])
        else:
            assert instruction.kind in LEFT, f"{instruction} is not run"
