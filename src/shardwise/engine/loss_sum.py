"""The loss of the whole batch, from what each process has seen of it."""

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
    """Last stages have seen the loss, each of its rows and tokens, tensor parallel ranks (`num_alike`) the same.

    All processes add up once in a step, each as soon as it can. `waits` says whether what else they tell each other in
    a step has to come first: then the sum is begun at its end.
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
        #: The sum of this step's loss over all processes, if it has been begun.
        self._under_way: tuple[Tensor, Any] | None = None

    def of(self, tally: Tally) -> Tally:
        """The loss of the whole batch."""
        if self._wires.watch is None:
            return tally
        numbers, work = self._under_way or self._start(tally)
        self._under_way = None
        self._wires.watch.wait(work, "the sum of the loss")
        return self._read(numbers)

    def find(self) -> Tally | None:
        """The same while a step goes on: None if it is not known yet."""
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
        """What the gradients of this step will be multiplied with, once its loss is known; None if it is not finite.

        Asked while its last backwards go on.
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
            # It is asked for again and again: what has been read once is not read again.
            total.add(tally.read())
        return total

    def _start(self, tally: Tally) -> tuple[Tensor, Any]:
        # Checksums of batches go with it, so that no exchange is made for them.
        numbers = torch.tensor([tally.total, tally.count, *self._same.numbers], dtype=torch.float64)
        return numbers, self._wires.start_sum(numbers)

    def _read(self, numbers: Tensor) -> Tally:
        self._same.told = numbers[2:].tolist()
        total, count = (numbers[:2] / self._num_alike).tolist()
        return Tally(total=total, count=count)
