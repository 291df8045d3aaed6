"""What both engines do alike: a step, an evaluation, and the state of the module under its own names."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.planner.plan import Plan
from shardwise.runtime.batch import cut_batch, shapes_of
from shardwise.runtime.interpreter import Interpreter, Tally
from shardwise.runtime.local import Record
from shardwise.runtime.pipeline import complete
from shardwise.runtime.recording import Recording
from shardwise.runtime.stage import Batch, Split
from shardwise.runtime.state import held_state, load_held_state
from shardwise.runtime.stream import Feedable, Stream
from shardwise.runtime.versions import WeightVersions
from shardwise.schedule.schedule import Schedule
from shardwise.trace.events import Trace

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Trainer(ABC):
    """Trains a module under a plan. Where ranks are processes, each has one and all call it alike.

    `parameters` and `buffers` are those that this process holds. After a step `gradient_norm` is that of the whole
    batch's gradient before it was clipped, if it was to be.
    """

    #: The ranks that this process runs.
    ranks: tuple[int, ...]

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        stages: Split,
        schedule: Schedule,
        *,
        optimizer: MakeOptimizer,
        clip: float | None,
        pad: bool,
    ) -> None:
        self.module, self.plan, self.split = module, plan, stages
        self._clip, self._pad = clip, pad
        self.schedule = self._complete(schedule, stages)
        here = [stage for stage in stages.stages if stage is not None]
        held = {name for stage in here for name in stage.parameters}
        self.parameters = {name: each for name, each in module.named_parameters() if name in held}
        self.buffers: dict[str, Tensor] = {name: each for stage in here for name, each in stage.buffers.items()}
        self._trained = {name: each for name, each in self.parameters.items() if each.requires_grad}
        # A rank whose stages have nothing to train takes part all the same.
        self.optimizer = optimizer(self._trained.values()) if self._trained else None
        self.gradient_norm: float | None = None
        self._recording: Recording | None = None
        self._trace: Trace | None = None
        self._stream: Stream | None = None

    @property
    def trace(self) -> Trace | None:
        """What happened on all ranks in the last step that was recorded."""
        if self._recording is not None:
            self._trace, self._recording = self._recording.trace(), None
        return self._trace

    def train_step(self, batch: Batch, *, trace: bool = False) -> float:
        """Take one step on a batch, the same on every rank, and return its loss. With `trace` it is recorded."""
        recording = Recording(self.schedule) if trace else None
        record = None if recording is None else recording.note
        self._forget_gradients()
        with self._told_to_all():
            microbatches, signature = self._cut(batch), ("train", shapes_of(batch))
            if self._stream is not None:
                tally = self._stream.train_step(microbatches, signature, record)
                start = perf_counter()
            else:
                tally = self._run(True, microbatches, signature, record)
                start = perf_counter()
                self._step(tally)
            if recording is not None:
                for rank in self.ranks:
                    recording.note_step(rank, start, perf_counter())
                self._gather_notes(recording)
                self._recording = recording
            return tally.mean

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Return the loss of a batch in evaluation mode; nothing changes."""
        self.flush()
        training = [each for each in self.module.modules() if each.training]
        self.module.eval()
        try:
            with self._told_to_all():
                return self._run(False, self._cut(batch), ("evaluate", shapes_of(batch)), None).mean
        finally:
            for each in training:
                each.training = True

    def state_dict(self, *, sharded: bool = False) -> dict[str, Any]:
        """Parameters and buffers under the names of the original module: all of them, or what this process holds.

        A tied parameter is there under each of its names. The tensors are the engine's own where it holds them.
        """
        self.flush()
        part = held_state(self.module, [*self.parameters.values(), *self.buffers.values()])
        return part if sharded else self._gather_state(part)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take weights and buffers from a state, of the whole module or of at least what this process holds."""
        self.flush()
        with self._told_to_all():
            load_held_state(self.module, [*self.parameters.values(), *self.buffers.values()], state)
        self._begin_stream()

    def flush(self) -> None:
        """Finish what is under way, where a schedule leaves its last step unfinished: the weights are the newest then.

        `evaluate`, `state_dict` and `load_state_dict` do this themselves. Every rank calls it.
        """
        if self._stream is not None:
            with torch.enable_grad(), self._told_to_all():
                self._stream.flush()

    def close(self) -> None:
        """Let go of what the engine keeps beside the module."""
        self.flush()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, story: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _cut(self, batch: Batch) -> list[Batch]:
        return cut_batch(batch, self.plan.microbatches, pad=self._pad)

    def _begin_stream(self) -> None:
        """Where the schedule never empties the pipe: start with an empty one, and the weights as they are."""
        if self.schedule.staleness:
            executor, interpreters = self._feedable()
            self._stream = Stream(
                executor,
                WeightVersions(self.module, self._trained),
                agree=self._agree,
                finish=self._finish,
                update=self._step,
            )
            for interpreter in interpreters:
                interpreter.select_weights = self._stream.select_weights

    def _step(self, tally: Tally) -> None:
        """Make the summed gradients those of the whole batch's mean, clip them, and step."""
        tally.mean  # noqa: B018 - a batch that has none says so here, before a weight has changed
        gradients = {name: each.grad for name, each in self._trained.items() if each.grad is not None}
        for gradient in gradients.values():
            gradient.div_(tally.count)
        if self._clip is not None:
            counted = [each for name, each in gradients.items() if self._counts(name)]
            square = torch.tensor(float(nn.utils.get_total_norm(counted)) ** 2, dtype=torch.float64)
            self._sum(square, "the norm of the gradients")
            self.gradient_norm = float(square) ** 0.5
            factor = self._clip / (self.gradient_norm + 1e-6)
            if factor < 1:
                for gradient in gradients.values():
                    gradient.mul_(factor)
        if self.optimizer is not None:
            self.optimizer.step()

    # What differs between one process and many.

    def _complete(self, schedule: Schedule, stages: Split) -> Schedule:
        """The schedule with all that the engine runs."""
        return complete(schedule, stages)

    def _forget_gradients(self) -> None:
        """Begin a step without the gradients of the last."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    @abstractmethod
    def _run(self, trains: bool, microbatches: list[Batch], signature: Hashable, record: Record | None) -> Tally:
        """Run a step or an evaluation from beginning to end, and return the loss of the whole batch."""

    @abstractmethod
    def _feedable(self) -> tuple[Feedable, list[Interpreter]]:
        """What runs steps one after the other, and the interpreters in it."""

    def _agree(self, tally: Tally) -> Tally:
        """The loss of the whole batch, from what was seen of it here."""
        return tally

    @abstractmethod
    def _finish(self, step: int) -> None:
        """Wait until the gradients of a step are complete."""

    @abstractmethod
    def _sum(self, numbers: Tensor, what: str) -> None:
        """Add up numbers over all processes, in place."""

    def _counts(self, name: str) -> bool:  # noqa: ARG002 - alone, all count
        """Whether a parameter is counted here, where each is counted once."""
        return True

    def _gather_state(self, part: dict[str, Any]) -> dict[str, Any]:
        """The whole state, from the part of each process."""
        return part

    @abstractmethod
    def _gather_notes(self, recording: Recording) -> None:
        """Add what other processes noted."""

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """Tell the other ranks of an error before it goes on to the caller."""
        yield
