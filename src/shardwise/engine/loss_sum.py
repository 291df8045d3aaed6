"""The loss of the whole batch, summed over all processes."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.same_batch import SameBatch
from shardwise.execution.interpreter import Interpreter
from shardwise.execution.step_losses import Tally
from shardwise.ranks.wires import Wires


class LossSum:
    """The sum of the loss over processes. Each last stage measures the loss of its rows and tokens; the `num_alike`
    tensor parallel ranks measure the same loss.

    All processes sum once in a step, each as early as it can. `waits` says whether other exchanges of the step must
    come first: then the sum starts at the end of the step.
    """

    def __init__(
        self,
        wires: Wires,
        interpreters: Sequence[Interpreter],
        *,
        num_alike: int,
        waits: Callable[[], bool],
        same: SameBatch,
    ) -> None:
        self._wires, self._interpreters = wires, interpreters
        self._num_alike, self._waits, self._same = num_alike, waits, same
        #: The sum of this step's loss over all processes, once it has been started.
        self._under_way: tuple[Tensor, Any] | None = None

    def of(self, tally: Tally) -> Tally:
        """Return the loss of the whole batch."""
        if self._wires.watch is None:
            return tally
        numbers, work = self._under_way or self._start(tally)
        self._under_way = None
        self._wires.watch.wait(work, "the sum of the loss")
        return self._read(numbers)

    def find(self) -> Tally | None:
        """Return the loss of the whole batch during a step; None if it is not known yet."""
        if self._wires.watch is None:
            return self._seen_here()
        if self._under_way is None:
            tally = None if self._waits() else self._seen_here()
            if tally is None:
                return None
            self._under_way = self._start(tally)
        numbers, work = self._under_way
        return self._read(numbers) if work.is_completed() else None

    def find_scale(self) -> float | None:
        """Return the scale of this step's gradients, if its loss is known and finite; else None.

        Called while the last backwards of the step run.
        """
        tally = self.find()
        if tally is None or not self._same.is_as_told:
            return None
        return 1 / tally.count if tally.count and isfinite(tally.mean) else None

    def _seen_here(self) -> Tally | None:
        total = Tally()
        for interpreter in self._interpreters:
            tally = interpreter.losses.find(0)
            if tally is None:
                return None
            # This is called repeatedly: `read` keeps the numbers, so a GPU is not read twice.
            total.add(tally.read())
        return total

    def _start(self, tally: Tally) -> tuple[Tensor, Any]:
        # Checksums of batches travel with it, so they need no exchange of their own.
        numbers = torch.tensor([tally.total, tally.count, *self._same.numbers], dtype=torch.float64)
        return numbers, self._wires.start_sum(numbers)

    def _read(self, numbers: Tensor) -> Tally:
        self._same.told = numbers[2:].tolist()
        total, count = (numbers[:2] / self._num_alike).tolist()
        return Tally(total=total, count=count)
