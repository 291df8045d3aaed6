"""The engine of many processes: this process runs one rank of the pipeline."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.planner.plan import Plan
from shardwise.runtime.clocks import SharedClock
from shardwise.runtime.faults import Watch
from shardwise.runtime.interpreter import Interpreter, Loss, Tally
from shardwise.runtime.local import Record
from shardwise.runtime.losses import by_rows
from shardwise.runtime.manner import Manner
from shardwise.runtime.notes import gather_notes
from shardwise.runtime.pipeline import forward_only
from shardwise.runtime.prepare import prepare
from shardwise.runtime.processes import ProcessExecutor
from shardwise.runtime.recording import Recording
from shardwise.runtime.stage import Batch
from shardwise.runtime.state import joined
from shardwise.runtime.statistics import SharedStatistics
from shardwise.runtime.stream import Feedable
from shardwise.runtime.ties import TiedGradients
from shardwise.runtime.trainer import MakeOptimizer, Trainer
from shardwise.runtime.transport import ProcessTransport, make_groups


class ProcessEngine(Trainer):
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
        compile: bool | str = False,
        seed: int = 0,
        pad: bool = False,
    ) -> None:
        self.rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.ranks = (self.rank,)
        stages, schedule = prepare(
            module, plan, loss=loss, example=example, rank=self.rank, pad=pad, seed=seed, compile=compile
        )
        super().__init__(module, plan, stages, schedule, optimizer=optimizer, clip=clip, pad=pad)
        self._watch = Watch(self.rank, num_ranks)
        self._ties = TiedGradients(self.rank, self.schedule.placement, self.split, self._parameter_of, self._watch)
        # Numbers that all ranks add up or tell each other have a group of their own: one that is given up on must not
        # take another's with it.
        self._everybody = dist.new_group(backend="gloo")
        self._watch.guard(self._everybody)
        self._clock = SharedClock(self._everybody, self._watch)
        self._transport = ProcessTransport(make_groups([range(num_ranks)]), watch=self._watch)
        self._trainer, self._evaluator = (
            ProcessExecutor(
                self.rank,
                each,
                self.split,
                by_rows(loss) if pad else loss,
                manner=Manner.of(plan),
                transport=self._transport,
                on_reduce=self._ties.reduce,
                watch=self._watch,
            )
            for each in (self.schedule, forward_only(self.schedule))
        )
        # Where the model is held twice, each copy sees a part of the microbatches.
        self._statistics: SharedStatistics | None = None
        if len(self.schedule.placement.pipes) > 1:
            self._statistics = SharedStatistics(module, self.buffers, self._gather)
        self._begin_stream()

    def close(self) -> None:
        """Stop watching the other ranks, and end what groups have: a thread and a connection for each other rank."""
        super().close()
        self._transport.close()
        self._ties.close()
        self._watch.close()
        if self._watch.guarded:
            # gloo ends them with the last name for the group.
            del self._everybody, self._clock
        while self._watch.guarded:
            dist.destroy_process_group(self._watch.guarded.pop())

    def _run(self, trains: bool, microbatches: list[Batch], signature: Hashable, record: Record | None) -> Tally:
        executor = self._trainer if trains else self._evaluator
        shares = trains and self._statistics is not None and self._statistics.are_there
        with self._statistics.shared() if shares else nullcontext():  # type: ignore[union-attr]
            tally = executor.run(microbatches, signature=signature, record=record)
        self._ties.finish()
        return self._agree(tally)

    def _feedable(self) -> tuple[Feedable, list[Interpreter]]:
        return self._trainer, [self._trainer.interpreter]

    def _parameter_of(self, name: str, step: int) -> nn.Parameter:
        return self.parameters[name] if self._stream is None else self._stream.parameter_of(name, step)

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._watch.fail(error)
            raise

    def _agree(self, tally: Tally) -> Tally:
        """The last stage has seen the loss; now everybody has."""
        numbers = torch.tensor([tally.total, tally.count], dtype=torch.float64)
        self._sum(numbers, "the sum of the loss")
        return Tally(total=float(numbers[0]), count=float(numbers[1]))

    def _finish(self, step: int) -> None:
        self._ties.finish(step)

    def _sum(self, numbers: Tensor, what: str) -> None:
        work: Any = dist.all_reduce(numbers, group=self._everybody, async_op=True)
        self._watch.wait(work, what)

    def _counts(self, name: str) -> bool:
        return name not in self._ties.counted_elsewhere

    def _gather_state(self, part: dict[str, Any]) -> dict[str, Any]:
        """Whole, on every rank. What others hold is on the CPU."""
        sent = {name: each.cpu() if isinstance(each, Tensor) else each for name, each in part.items()}
        return joined(self.module, [*self._gather(sent), part])

    def _gather(self, given: Any) -> list[Any]:
        """What each rank gives, on every rank."""
        told = [None for _ in self.schedule.orders]
        self._watch.at("the gathering of what ranks hold")
        try:
            dist.all_gather_object(told, given, group=self._everybody)
        except RuntimeError as error:
            self._watch.explain(error)
        return told

    def _gather_notes(self, recording: Recording) -> None:
        gather_notes(
            recording,
            self.schedule,
            self.rank,
            group=self._everybody,
            correction=self._clock.correction(),
            watch=self._watch,
        )
