"""All ranks of a pipeline in one process, one instruction at a time: the definition of what a schedule means.

Ranks take turns. Each runs its list in order, as far as what its next computation needs is there; a send delivers at
once. Nothing here is fast, and nothing is left to chance: the other executors are held against it.
"""

from collections.abc import Callable
from time import perf_counter

from shardwise.runtime.interpreter import Interpreter, Loss, Tally
from shardwise.runtime.manner import Manner
from shardwise.runtime.stage import Batch, Split
from shardwise.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.schedule import Schedule

#: Called for each instruction that takes time: rank, instruction, start and end in seconds.
Record = Callable[[int, Instruction, float, float], None]

#: A send delivers what its receive would wait for; all stages step together, when the executor has finished.
_TAKES_TIME = (COMPUTE | SENDS) - {Kind.STEP}


class LocalExecutor:
    """Interprets a complete schedule (`schedule.passes.lower`) over the stages of a split module."""

    def __init__(self, schedule: Schedule, split: Split, loss: Loss, manner: Manner | None = None) -> None:
        self.schedule = schedule
        self.ranks = [Interpreter(rank, schedule, split, loss, manner) for rank in range(schedule.num_ranks)]
        self._needs = Needs(schedule)
        self._receive_of = {
            self._needs.before[node][0]: instruction
            for node, instruction in enumerate(self._needs.nodes)
            if instruction.kind in RECEIVES
        }

    def run(
        self, microbatches: list[Batch], *, on_step: Callable[[Instruction], None], record: Record | None = None
    ) -> Tally:
        """Run a step. `on_step` is called for each STEP, when the gradients of its stage are complete."""
        for interpreter in self.ranks:
            interpreter.begin(microbatches)
        position, done = [0] * len(self.ranks), [False] * len(self._needs.nodes)
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(self.schedule.orders):
                while position[rank] < len(order) and self._is_ready(rank, position[rank], done):
                    node = self._needs.first_node[rank] + position[rank]
                    start = perf_counter()
                    self._do(rank, node, on_step)
                    if record is not None and order[position[rank]].kind in _TAKES_TIME:
                        record(rank, order[position[rank]], start, perf_counter())
                    done[node] = True
                    position[rank] += 1
                    moved = True
        assert all(done), "a proven schedule does not get stuck"
        total = Tally()
        for tally in (interpreter.finish() for interpreter in self.ranks):
            total.total += tally.total
            total.count += tally.count
        return total

    def _is_ready(self, rank: int, position: int, done: list[bool]) -> bool:
        """Whether an instruction may run. What runs beside computation is only issued here, so it always may."""
        node = self._needs.first_node[rank] + position
        kind = self._needs.nodes[node].kind
        if kind not in COMPUTE and kind not in SENDS:
            return True
        return all(self._is_finished(need, done) for need in self._needs.before[node])

    def _is_finished(self, node: int, done: list[bool]) -> bool:
        """Whether what an instruction gives is there: for what runs beside computation, once its own needs are."""
        kind = self._needs.nodes[node].kind
        if kind in COMPUTE or kind in SENDS:
            return done[node]
        return all(self._is_finished(need, done) for need in self._needs.before[node])

    def _do(self, rank: int, node: int, on_step: Callable[[Instruction], None]) -> None:
        instruction, interpreter = self._needs.nodes[node], self.ranks[rank]
        kind = instruction.kind
        if kind is Kind.STEP:
            on_step(instruction)
        elif kind in COMPUTE:
            interpreter.compute(instruction)
        elif kind in SENDS:
            assert instruction.peer is not None, f"{instruction} names no peer"
            receiver = self.ranks[self.schedule.placement.ranks[instruction.peer]]
            receiver.incoming(self._receive_of[node], interpreter.outgoing(instruction))
        # Receives were delivered with their sends. In one process parameters are whole and tied ones are one tensor:
        # nothing is gathered, released or reduced.
