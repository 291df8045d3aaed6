"""The losses of a step's microbatches, as one rank measures them, and the metrics beside them."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.stages.losses import describe
from shardwise.stages.metrics import Pairs, pairs_of, take_metrics
from shardwise.stages.stage import Batch, Loss


class Measured(NamedTuple):
    """The loss of a microbatch, the number of terms that it sums (1 for a mean), and the metrics beside it."""

    total: Tensor
    number: Tensor | float
    metrics: Pairs


class Tally:
    """The loss of a step so far: either sums with their numbers of terms, or means with the number of means.

    Losses on a GPU are read only when a number is requested: until then the host does not wait for them.
    """

    def __init__(self, total: float = 0.0, count: float = 0.0, measured: Sequence[Measured] = ()) -> None:
        self._total, self._count = total, count
        #: Losses that have not been read, rank by rank.
        self._unread = [list(measured)] if measured else []

    def add(self, other: "Tally") -> None:
        self._total += other._total
        self._count += other._count
        self._unread += other._unread

    def again(self) -> "Tally":
        """Return a copy with the losses unread: those of a CUDA graph have new values after each replay."""
        copied = Tally(self._total, self._count)
        copied._unread = list(self._unread)
        return copied

    def read(self) -> "Tally":
        """Read all losses now, waiting for the device."""
        unread, self._unread = self._unread, []
        for measured in unread:
            self._total += sum(float(each.total) for each in measured)
            self._count += sum(float(each.number) for each in measured)
        return self

    @property
    def total(self) -> float:
        return self.read()._total

    @property
    def count(self) -> float:
        return self.read()._count

    def on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return total and count as double-precision tensors on a device, without reading (no synchronization)."""
        total, count = (torch.full((), each, dtype=torch.float64, device=device) for each in (self._total, self._count))
        for each in chain.from_iterable(self._unread):
            total = total + each.total.reshape(())
            count = count + each.number
        return total, count

    @property
    def mean(self) -> float:
        if not self.count:
            raise ShardwiseError(
                "the loss is a sum over 0 numbers in the whole batch, so it has no mean",
                remedy="leave out batches without a label",
            )
        return self.total / self.count


class StepLosses:
    """The losses that one rank measures, by step. `instructions` cover `num_steps` steps."""

    def __init__(self, instructions: Sequence[Instruction], lasts: set[int], num_steps: int) -> None:
        self._measured: dict[int, list[Measured]] = {}
        self._tallies: dict[int, Tally] = {}
        #: How many losses of a step are measured here.
        self._num = len([each for each in instructions if each.kind is Kind.F and each.stage in lasts]) // num_steps
        #: All metrics of each microbatch of the last step.
        self.metrics: list[Pairs] = []
        #: Called when all losses of a step that this rank measures are known; if it measures none, at once.
        self.on_all: Callable[[], None] | None = None

    def clear(self) -> None:
        """Start over."""
        self._measured.clear()
        self._tallies.clear()

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._measured[step], self.metrics = [], []
        if self.on_all is not None and not self._num:
            self.on_all()

    def add(self, step: int, measured: Measured) -> None:
        """Add the loss that a forward measured."""
        self._measured[step].append(Measured(measured.total.detach(), measured.number, {}))
        self.metrics.append(measured.metrics)
        if self.on_all is not None and len(self._measured[step]) == self._num:
            self.on_all()

    def take(self, step: int) -> Tally:
        """Remove and return the part of a step's loss measured here. All its forwards must have run."""
        found = self.find(step)
        assert found is not None, f"not all forwards of step {step} have been run"
        del self._tallies[step], self._measured[step]
        return found

    def find(self, step: int) -> Tally | None:
        """Return the loss of a step in progress; None if forwards are still to come, or the step has not begun."""
        measured = self._measured.get(step)
        if step not in self._tallies and measured is not None and len(measured) == self._num:
            self._tallies[step] = Tally(measured=measured)
        return self._tallies.get(step)


def measure(loss: Loss, output: Any, batch: Batch, stage: int, microbatch: int, observed: Pairs) -> Measured:
    """Compute the loss of a microbatch and its metrics, merged with those `observed` before."""
    try:
        result, metrics = take_metrics(loss(output, batch))
    except Exception as error:
        error.add_note(f"in the loss of microbatch {microbatch}, which stage {stage} gave {describe(output)}")
        raise
    total, number = result if isinstance(result, tuple) else (result, 1)
    measured = Measured(total, number, {**observed, **({} if metrics is None else pairs_of(metrics))})
    if measured.total.numel() != 1:
        raise ShardwiseError(
            f"the loss is {describe(measured.total)}, but it must be one number for a microbatch",
            remedy="return loss.sum(), loss.numel()",
        )
    return measured
