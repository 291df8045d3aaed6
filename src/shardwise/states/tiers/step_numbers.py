"""Numbers that an optimizer of a user's own counts in its `step`, where one step of training calls it several times.

    def step(self):
        self.t += 1                     group["step"] += 1
        ... / (1 - beta ** self.t)

Optimizer state on the host is staged some weights at a time, and `step` is called for each time. So each call begins
with the numbers that the first one began with, and they are counted once.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from shardwise.states.optimizer_copy import inner_optimizers
from shardwise.states.parameter_group import ELEMENTWISE, MATRIXWISE

_NUMBERS = (int, float, bool)


class StepNumbers:
    """Numbers in the attributes and groups of an optimizer, and of those that it holds."""

    def __init__(self, optimizer: Optimizer) -> None:
        is_known = type(optimizer) in ELEMENTWISE | MATRIXWISE
        self._optimizers = [] if is_known else [optimizer, *inner_optimizers(optimizer)]
        self._step = -1
        self._before: list[Mapping[str, Any]] = []
        self._after: list[Mapping[str, Any]] = []

    @contextmanager
    def call(self, step: int) -> Iterator[None]:
        """Around a call that belongs to a step of training."""
        if step != self._step:
            self._step, self._before = step, self._numbers()
        else:
            self._set_back()
        yield
        self._after = self._numbers()

    def _set_back(self) -> None:
        """What somebody else has set since the last call stays."""
        for owner, before, after in zip(self._owners(), self._before, self._after, strict=False):
            for name in [name for name, value in after.items() if owner.get(name) == value]:
                if name in before:
                    owner[name] = before[name]
                else:
                    del owner[name]

    def _numbers(self) -> list[Mapping[str, Any]]:
        return [{name: value for name, value in each.items() if type(value) in _NUMBERS} for each in self._owners()]

    def _owners(self) -> list[dict[str, Any]]:
        return [owner for one in self._optimizers for owner in (vars(one), *one.param_groups)]
