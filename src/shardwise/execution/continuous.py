"""Batches fed to a pipeline that is never emptied between steps, and the weights' steps one batch later."""

from collections.abc import Callable, Hashable
from typing import Protocol

from torch import nn

from shardwise.execution.interpreter import Tally
from shardwise.execution.local import Record
from shardwise.execution.weight_stash import WeightStash
from shardwise.stages.stage import Batch


class ContinuousExecutor(Protocol):
    """An executor of several steps."""

    @property
    def is_full(self) -> bool: ...

    def feed(self, microbatches: list[Batch], *, signature: Hashable, record: Record | None = None) -> Tally: ...

    def flush(self, *, record: Record | None = None) -> None: ...


class Stream:
    """Drives an executor batch by batch.

    A batch's gradients are complete on every rank when the next batch has been fed, or the pipe was emptied: then
    `finish(step)` waits for what is still being summed, and `update(tally)` steps. What is computed is the same
    whenever the pipe is emptied; only time is lost. Steps are counted from there, as in the schedule; batches are not.
    """

    def __init__(
        self,
        executor: ContinuousExecutor,
        versions: WeightStash,
        *,
        agree: Callable[[Tally], Tally],
        finish: Callable[[int], None],
        update: Callable[[Tally], None],
    ) -> None:
        self._executor, self._versions = executor, versions
        self._agree, self._finish, self._update = agree, finish, update
        self._num_batches = self._first = 0
        self._under_way: Tally | None = None
        self._signature: Hashable = None

    def select_weights(self, step: int) -> None:
        """Let the module compute with the weights of a step."""
        self._versions.select(self._first + step)

    def parameter_of(self, name: str, step: int) -> nn.Parameter:
        """What a step uses as this parameter."""
        return self._versions.of(name, self._first + step)

    def train_step(self, microbatches: list[Batch], signature: Hashable, record: Record | None = None) -> Tally:
        """Feed a batch, and step with the one before it."""
        if signature != self._signature or self._executor.is_full:
            self.flush(record)
            self._signature = signature
        tally = self._agree(self._executor.feed(microbatches, signature=signature, record=record))
        self._versions.rest()
        self._step()
        self._under_way, self._num_batches = tally, self._num_batches + 1
        return tally

    def flush(self, record: Record | None = None) -> None:
        """Empty the pipe, and step with its last batch: then the weights are the newest that there can be."""
        if self._under_way is not None:
            self._executor.flush(record=record)
            self._versions.rest()
            self._step()
            self._versions.settle()
            self._first = self._num_batches

    def _step(self) -> None:
        """Step with the batch that was fed last but is not stepped with yet."""
        if self._under_way is None:
            return
        batch = self._num_batches - 1
        self._finish(batch - self._first)
        self._versions.prepare(batch)
        self._update(self._under_way)
        self._under_way = None
