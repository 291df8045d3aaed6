"""Half precision: its loss is multiplied so that small gradients do not vanish, and divided out again.

A loss is given to an engine as a sum and what it is summed over. Both multiplied by the same number are the same mean,
and the engine divides gradients by the second: so backwards run on large numbers, and what comes out of them is right.
A step whose gradients overflowed is left out, and the next has half the factor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.nets.loss import has_lazy_logits, next_token_loss
from shardwise.stages.metrics import take_metrics, with_metrics
from shardwise.stages.stage import Loss

# The loss is a sum: its gradient by a logit is at most 1 times the factor, and half precision ends at 65504.
_FIRST = 2.0**12
_HIGHEST = 2.0**15
#: So many good steps in a row, and it is doubled.
_PATIENCE = 1000


@dataclass(kw_only=True)
class LossScale:
    """The factor of now, on `plain`. It is 1 for ever where nothing can vanish."""

    plain: Loss = next_token_loss
    factor: float = 1.0
    is_fixed: bool = True
    num_good: int = 0
    _compiled: Loss | None = None

    @staticmethod
    def of(precision: str, loss: Loss = next_token_loss) -> "LossScale":
        is_half = precision == "fp16"
        return LossScale(plain=loss, factor=_FIRST if is_half else 1.0, is_fixed=not is_half)

    @property
    def has_factor(self) -> bool:
        """Whether sums and numbers are multiplied: then the first is not to be divided before its backward."""
        return not self.is_fixed

    def loss(self, output: Any, batch: Mapping[str, Any]) -> "Tensor | tuple[Any, ...]":
        """The loss, as engines take it. A mean without a count weighs 1."""
        # An evaluation has no gradient, and would be compiled once more.
        is_compiled = self._compiled is not None and torch.is_grad_enabled() and not has_lazy_logits(output)
        found = (self._compiled if self._compiled and is_compiled else self.plain)(output, batch)
        if self.factor == 1.0:
            return found
        result, metrics = take_metrics(found)
        total, count = result if isinstance(result, tuple) else (result, 1)
        scaled: tuple[Any, ...] = with_metrics((total * self.factor, count * self.factor), metrics)
        return scaled

    def compile(self) -> None:
        """Have the next-token loss compiled, at its first call: logits are a model's largest tensor, and are read and
        written a few times less. Logits that wait are never written. A loss of the user's is left as it is."""
        if self.plain is next_token_loss:
            self._compiled = torch.compile(self.plain)

    def note(self, *, is_finite: bool) -> None:
        """How a step went."""
        if self.is_fixed:
            return
        self.num_good = self.num_good + 1 if is_finite else 0
        if not is_finite:
            self.factor /= 2
        elif self.num_good % _PATIENCE == 0:
            self.factor = min(_HIGHEST, self.factor * 2)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"loss_scale": self.factor, "good_steps": self.num_good}

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on as it was."""
        self.factor = state.get("loss_scale", self.factor)
        self.num_good = int(state.get("good_steps", 0))
