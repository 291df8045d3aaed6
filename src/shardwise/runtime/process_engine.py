"""The engine of many processes: this process runs one rank of the pipeline."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.planner.plan import Plan
from shardwise.runtime.batch import cut_batch, home_of, shapes_of
from shardwise.runtime.engine import MakeOptimizer
from shardwise.runtime.faults import Watch
from shardwise.runtime.interpreter import Loss, Tally
from shardwise.runtime.manner import Manner
from shardwise.runtime.pipeline import complete, forward_only, schedule_of
from shardwise.runtime.processes import ProcessExecutor
from shardwise.runtime.split import split
from shardwise.runtime.stage import Batch
from shardwise.runtime.stream import Stream
from shardwise.runtime.ties import TiedGradients
from shardwise.runtime.transport import ProcessTransport, make_groups
from shardwise.runtime.versions import WeightVersions


class ProcessEngine:
    """Trains a module under a plan; every process of the default group holds one and calls it alike.

    Each holds the parameters of its own stages and no others.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        loss: Loss,
        optimizer: MakeOptimizer,
        example: Batch,
        clip: float | None = None,
    ) -> None:
        self.module, self.plan, self._clip = module, plan, clip
        self.rank, num_ranks = dist.get_rank(), dist.get_world_size()
        schedule, manner = schedule_of(plan), Manner.of(plan)
        count = len(schedule.placement.pipes[0])
        mine = {stage % count for stage in schedule.placement.stages[self.rank]}
        microbatch = cut_batch(example, plan.microbatches)[0]
        with manner.precision(home_of(microbatch)):
            self.split = split(module.train(), count, microbatch, only=mine, cut=plan.layers)
        self.schedule = complete(schedule, self.split)
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        for number in sorted(mine):
            stage = self.split.stages[number]
            assert stage is not None, f"stage {number} was asked for"
            self.parameters.update(stage.parameters)
            self.buffers.update(stage.buffers)
        self._watch = Watch(self.rank, num_ranks)
        self._ties = TiedGradients(self.rank, self.schedule.placement, self.split, self._parameter_of, self._watch)
        # Sums over all ranks have a group of their own: one that is given up on must not take another's with it.
        self._everybody = dist.new_group()
        self._watch.guard(self._everybody)
        self._transport = ProcessTransport(make_groups([range(num_ranks)]), watch=self._watch)
        self._trainer, self._evaluator = (
            ProcessExecutor(
                self.rank,
                each,
                self.split,
                loss,
                manner=manner,
                transport=self._transport,
                on_reduce=self._ties.reduce,
                watch=self._watch,
            )
            for each in (self.schedule, forward_only(self.schedule))
        )
        self._trainable = {name: each for name, each in self.parameters.items() if each.requires_grad}
        # A rank whose stages have nothing to train takes part all the same.
        self.optimizer = optimizer(self._trainable.values()) if self._trainable else None
        self.gradient_norm: float | None = None
        self._stream: Stream | None = None
        if self.schedule.staleness:
            self._stream = Stream(
                self._trainer,
                WeightVersions(module, self._trainable),
                agree=self._agree,
                finish=self._ties.finish,
                update=self._step,
            )
            self._trainer.interpreter.select_weights = self._stream.select_weights

    def train_step(self, batch: Batch) -> float:
        """Take one step on a batch, the same on every rank, and return its loss."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        if self._stream is not None:
            microbatches = cut_batch(batch, self.plan.microbatches)
            with self._published():
                return self._stream.train_step(microbatches, ("train", shapes_of(batch))).mean
        tally = self._run(self._trainer, batch, "train")
        self._step(tally)
        return tally.mean

    def flush(self) -> None:
        """Finish what is under way, where a schedule leaves its last step unfinished: the weights are the newest then.

        `evaluate` and `state_dict` do this themselves. Every rank calls it.
        """
        if self._stream is not None:
            with torch.enable_grad(), self._published():
                self._stream.flush()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Return the loss of a batch in evaluation mode; nothing changes."""
        self.flush()
        training = [each for each in self.module.modules() if each.training]
        self.module.eval()
        try:
            return self._run(self._evaluator, batch, "evaluate").mean
        finally:
            for each in training:
                each.training = True

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of the whole module, under its own names, on every rank."""
        self.flush()
        parts: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
        persistent = set(self.module.state_dict())
        held = {**self.parameters, **self.buffers}
        dist.all_gather_object(parts, {name: each.detach().cpu() for name, each in held.items() if name in persistent})
        whole = {name: tensor for part in parts for name, tensor in part.items()}
        # A tied parameter has several names in the original, of which a stage uses one.
        first_name = {id(each): name for name, each in reversed(self._originals())}
        return {name: whole[name] if name in whole else whole[first_name[id(each)]] for name, each in self._originals()}

    def _originals(self) -> list[tuple[str, Tensor]]:
        return list(self.module.state_dict(keep_vars=True).items())

    def _parameter_of(self, name: str, step: int) -> nn.Parameter:
        return self.parameters[name] if self._stream is None else self._stream.parameter_of(name, step)

    @contextmanager
    def _published(self) -> Iterator[None]:
        """Tell the other ranks of an error before it goes on to the caller."""
        try:
            yield
        except BaseException as error:
            self._watch.fail(error)
            raise

    def _run(self, executor: ProcessExecutor, batch: Batch, what: str) -> Tally:
        microbatches = cut_batch(batch, self.plan.microbatches)
        with self._published():
            tally = executor.run(microbatches, signature=(what, shapes_of(batch)))
            self._ties.finish()
            return self._agree(tally)

    def _agree(self, tally: Tally) -> Tally:
        """The last stage has seen the loss; now everybody has."""
        numbers = torch.tensor([tally.total, tally.count], dtype=torch.float64)
        self._sum(numbers, "the sum of the loss")
        return Tally(total=float(numbers[0]), count=float(numbers[1]))

    def _step(self, tally: Tally) -> None:
        """Make the summed gradients those of the whole batch's mean, clip them, and step."""
        gradients = {name: each.grad for name, each in self._trainable.items() if each.grad is not None}
        for gradient in gradients.values():
            gradient.div_(tally.count)
        if self._clip is not None:
            counted = [each for name, each in gradients.items() if name not in self._ties.counted_elsewhere]
            square = torch.tensor(sum(float(each.norm()) ** 2 for each in counted), dtype=torch.float64)
            self._sum(square, "the norm of the gradients")
            self.gradient_norm = float(square) ** 0.5
            factor = self._clip / (self.gradient_norm + 1e-6)
            if factor < 1:
                for gradient in gradients.values():
                    gradient.mul_(factor)
        if self.optimizer is not None:
            self.optimizer.step()

    def _sum(self, numbers: Tensor, what: str) -> None:
        work = dist.all_reduce(numbers, group=self._everybody, async_op=True)
        assert work is not None, "this rank is one of everybody"
        self._watch.wait(work, what)

    def close(self) -> None:
        """Stop watching the other ranks."""
        self._transport.close()
        self._watch.close()
