"""The engine of many processes: this process runs one rank of the pipeline."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.distributed import ConnectedTrainer
from shardwise.engine.module_state import joined
from shardwise.engine.options import Options
from shardwise.engine.prepare import prepare
from shardwise.execution.interpreter import Tally
from shardwise.execution.local import Record
from shardwise.planner.plan import Plan
from shardwise.stages.batch import home_of
from shardwise.stages.stage import Batch, Loss
from shardwise.states.batch_norm import SharedStatistics
from shardwise.states.optimizers.state import joined_states, on_cpu
from shardwise.states.parameter_group import MakeOptimizer, Share
from shardwise.states.tied_gradients import TiedGradients


class ProcessEngine(ConnectedTrainer):
    """Trains a module under a plan; every process of the default group holds one and calls it alike.

    Each holds the parameters of its own stages and no others.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        loss: Loss,
        optimizer: MakeOptimizer | Sequence[Share],
        example: Batch,
        options: Options | None = None,
    ) -> None:
        self.rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.ranks = (self.rank,)
        how = options or Options()
        stages, schedule, callers = prepare(module, plan, loss=loss, example=example, rank=self.rank, options=how)
        super().__init__(module, plan, stages, schedule, optimizer=optimizer, clip=how.clip, pad=how.pad)
        self._connect(compiles=bool(how.compile))
        self._ties = TiedGradients(self.rank, self.schedule.placement, self.split, self._parameter_of, self._watch)
        self._transport = self._make_transport([range(num_ranks)], home_of(example), self._watch)
        self._make_executors(loss, watch=self._watch, on_reduce=self._ties.reduce)
        # Where the model is held twice, each copy sees a part of the microbatches.
        if len(self.schedule.placement.pipes) > 1:
            self._statistics = SharedStatistics(module, self.buffers, self._gather)
        if not how.compile:
            self._draw_alike(how.seed, callers)
        self._begin_host()
        self._begin_stream()

    def _disconnect(self) -> None:
        self._ties.close()

    def _run(self, trains: bool, microbatches: list[Batch], signature: Hashable, record: Record | None) -> Tally:
        executor = self._trainer if trains else self._evaluator
        shares = trains and self._shares_statistics
        with self._statistics.shared() if shares else nullcontext():  # type: ignore[union-attr]
            tally = executor.run(microbatches, signature=signature, record=record)
        self._ties.finish()
        return self._agree(tally)

    def _parameter_of(self, name: str, step: int) -> nn.Parameter:
        return self.parameters[name] if self._stream is None else self._stream.parameter_of(name, step)

    def _finish(self, step: int) -> None:
        self._ties.finish(step)

    def _counts(self, name: str) -> bool:
        return name not in self._ties.counted_elsewhere

    def _gather_state(self, part: dict[str, Any]) -> dict[str, Any]:
        """Whole, on every rank. What others hold is on the CPU."""
        sent = {name: each.cpu() if isinstance(each, Tensor) else each for name, each in part.items()}
        return joined(self.module, [*self._gather(sent), part])

    def assembled(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        told = self._gather({name: each.detach().cpu() for name, each in parts.items()})
        return {name: each for part in (*told, parts) for name, each in part.items()}

    def _gather_optimizer_state(self, part: dict[str, Any]) -> dict[str, Any]:
        sent = {**part, "state": {name: on_cpu(each) for name, each in part["state"].items()}}
        return joined_states([*self._gather(sent), part], [name for name, _ in self.module.named_parameters()])
