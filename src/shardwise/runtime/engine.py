"""The engine of one process, which runs every rank of a plan itself.

It is what a laptop debugs with, and what the engine of many processes is held against.
"""

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.planner.plan import Plan
from shardwise.runtime.batch import cut_batch, home_of, shapes_of
from shardwise.runtime.interpreter import Loss, Tally
from shardwise.runtime.local import LocalExecutor
from shardwise.runtime.manner import Manner
from shardwise.runtime.pipeline import complete, forward_only, schedule_of
from shardwise.runtime.recording import Recording
from shardwise.runtime.split import split
from shardwise.runtime.stage import Batch, Split
from shardwise.runtime.stream import Stream
from shardwise.runtime.versions import WeightVersions
from shardwise.schedule.schedule import Schedule
from shardwise.trace.events import Trace

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def make_engine(
    module: nn.Module, plan: Plan, *, loss: Loss, optimizer: MakeOptimizer, example: Batch, clip: float | None = None
) -> "Engine":
    """Return the engine of this process, for a plan and a module that were checked."""
    schedule = schedule_of(plan)
    microbatch = cut_batch(example, plan.microbatches)[0]
    with Manner.of(plan).precision(home_of(microbatch)):
        stages = split(module.train(), len(schedule.placement.pipes[0]), microbatch, cut=plan.layers)
    return Engine(module, plan, stages, schedule, loss=loss, optimizer=optimizer, clip=clip)


class Engine:
    """Trains a module under a plan, all ranks in this process.

    After a step `gradient_norm` is that of the whole batch's gradient before it was clipped, if it was to be; and
    `trace` is what happened, if it was asked for.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        stages: Split,
        schedule: Schedule,
        *,
        loss: Loss,
        optimizer: MakeOptimizer,
        clip: float | None = None,
    ) -> None:
        self.module, self.plan, self.split, self._clip = module, plan, stages, clip
        self.schedule = complete(schedule, stages)
        self._trainer = LocalExecutor(self.schedule, stages, loss, Manner.of(plan))
        self._evaluator = LocalExecutor(forward_only(self.schedule), stages, loss, Manner.of(plan))
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self.optimizer = optimizer(self._parameters)
        self.gradient_norm: float | None = None
        self.trace: Trace | None = None
        self._stream: Stream | None = None
        if self.schedule.staleness:
            trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
            self._stream = Stream(
                self._trainer,
                WeightVersions(module, trained),
                agree=lambda tally: tally,
                finish=lambda _: None,
                update=self._step,
            )
            for interpreter in self._trainer.ranks:
                interpreter.select_weights = self._stream.select_weights

    def train_step(self, batch: Batch, *, trace: bool = False) -> float:
        """Take one step on a batch and return its loss."""
        microbatches = cut_batch(batch, self.plan.microbatches)
        recording = Recording(self.schedule) if trace else None
        self.optimizer.zero_grad(set_to_none=True)
        record = recording.note if recording else None
        if self._stream is not None:
            tally = self._stream.train_step(microbatches, shapes_of(batch), record)
            start, loss = perf_counter(), tally.mean
        else:
            tally = self._trainer.run(microbatches, record=record)
            start, loss = perf_counter(), tally.mean
            self._step(tally)
        if recording is not None:
            for rank, order in enumerate(self.schedule.orders):
                recording.note(rank, order[-1], start, perf_counter())
            self.trace = recording.trace()
        return loss

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Return the loss of a batch in evaluation mode; nothing changes."""
        microbatches = cut_batch(batch, self.plan.microbatches)
        self.flush()
        training = [each for each in self.module.modules() if each.training]
        self.module.eval()
        try:
            return self._evaluator.run(microbatches).mean
        finally:
            for each in training:
                each.training = True

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers under the names of the original module."""
        self.flush()
        return self.module.state_dict()

    def flush(self) -> None:
        """Finish what is under way, where a schedule leaves its last step unfinished: the weights are the newest then.

        `evaluate` and `state_dict` do this themselves.
        """
        if self._stream is not None:
            with torch.enable_grad():
                self._stream.flush()

    def _step(self, tally: Tally) -> None:
        """Make the summed gradients those of the whole batch's mean, clip them, and step."""
        gradients: list[Tensor] = [each.grad for each in self._parameters if each.grad is not None]
        for gradient in gradients:
            gradient.div_(tally.count)
        if self._clip is not None:
            self.gradient_norm = float(nn.utils.clip_grad_norm_(self._parameters, self._clip))
        self.optimizer.step()
