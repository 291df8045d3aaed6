"""The engine of one process, which runs every rank of a plan itself.

It is what a laptop debugs with, and what the engine of many processes is held against.
"""

from collections.abc import Collection, Hashable, Sequence

from torch import Tensor, nn

from shardwise.engine.trainer import Trainer
from shardwise.execution.compute_policy import Manner
from shardwise.execution.continuous import Feedable
from shardwise.execution.interpreter import Interpreter, Tally
from shardwise.execution.local import LocalExecutor, Record
from shardwise.execution.pipeline import forward_only
from shardwise.planner.plan import Plan
from shardwise.schedule.schedule import Schedule
from shardwise.stages.losses import by_rows
from shardwise.stages.stage import Batch, Loss, Split
from shardwise.states.parameter_group import MakeOptimizer, Share


class Engine(Trainer):
    """Trains a module under a plan, all ranks in this process."""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        stages: Split,
        schedule: Schedule,
        *,
        loss: Loss,
        optimizer: MakeOptimizer | Sequence[Share],
        clip: float | None = None,
        pad: bool = False,
        seed: int | None = 0,
        callers: Collection[str] = (),
    ) -> None:
        super().__init__(module, plan, stages, schedule, optimizer=optimizer, clip=clip, pad=pad)
        self.ranks = tuple(range(self.schedule.num_ranks))
        self._trainer, self._evaluator = (
            LocalExecutor(each, stages, by_rows(loss) if pad else loss, Manner.of(plan))
            for each in (self.schedule, forward_only(self.schedule))
        )
        if seed is not None:
            self._draw_alike(seed, callers)
        self._begin_host()
        self._begin_stream()

    def _run(
        self,
        trains: bool,
        microbatches: list[Batch],
        signature: Hashable,  # noqa: ARG002 - nothing has to be agreed on
        record: Record | None,
    ) -> Tally:
        return (self._trainer if trains else self._evaluator).run(microbatches, record=record)

    def _feedable(self) -> tuple[Feedable, list[Interpreter]]:
        return self._trainer, self._trainer.ranks

    def _find_tally(self) -> Tally | None:
        total = Tally()
        for interpreter in self._trainer.ranks:
            tally = interpreter.find_tally(0)
            if tally is None:
                return None
            total.add(tally)
        return total

    def _finish(self, step: int) -> None:
        """Gradients are complete as soon as they are computed."""

    def _sum(self, numbers: Tensor, what: str) -> None:
        """They are the sum."""
