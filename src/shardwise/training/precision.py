"""Dynamic loss scaling for fp16: the loss is multiplied by a factor so that small gradients do not underflow.

An engine takes a loss as a sum and a count. Multiplied by the same factor, both give the same mean, and the engine
divides gradients by the count. So the backward runs on scaled values, and the final gradients are unscaled.
A step whose gradients overflow is skipped, and the factor is halved for the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.nets.loss import has_lazy_logits, next_token_loss
from shardwise.stages.metrics import take_metrics, with_metrics
from shardwise.stages.stage import Loss

# The loss is a sum, so its gradient by a logit is at most the factor. The largest fp16 number is 65504.
_FIRST = 2.0**12
_HIGHEST = 2.0**15
#: The factor is doubled after this many finite steps in a row.
_PATIENCE = 1000


@dataclass(kw_only=True)
class LossScale:
    """The current factor of the loss `plain`. Except for fp16 it is always 1."""

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
        """Whether sum and count are scaled. Then the sum must not be divided by the count before the backward."""
        return not self.is_fixed

    def loss(self, output: Any, batch: Mapping[str, Any]) -> "Tensor | tuple[Any, ...]":
        """Return the scaled loss, as engines take it. A mean without a count has the count 1."""
        # Evaluation runs without gradients and would cause another compilation.
        is_compiled = self._compiled is not None and torch.is_grad_enabled() and not has_lazy_logits(output)
        found = (self._compiled if self._compiled and is_compiled else self.plain)(output, batch)
        if self.factor == 1.0:
            return found
        result, metrics = take_metrics(found)
        total, count = result if isinstance(result, tuple) else (result, 1)
        scaled: tuple[Any, ...] = with_metrics((total * self.factor, count * self.factor), metrics)
        return scaled

    def compile(self) -> None:
        """Compile the next-token loss, at its first call. Logits are a model's largest tensor, and this saves several
        reads and writes of them. Lazy logits, which are never written, and a user's loss are not compiled."""
        if self.plain is next_token_loss:
            self._compiled = torch.compile(self.plain)

    def note(self, *, is_finite: bool) -> None:
        """Update the factor after a step."""
        if self.is_fixed:
            return
        self.num_good = self.num_good + 1 if is_finite else 0
        if not is_finite:
            self.factor /= 2
        elif self.num_good % _PATIENCE == 0:
            self.factor = min(_HIGHEST, self.factor * 2)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"loss_scale": self.factor, "good_steps": self.num_good}

    def take(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.factor = state.get("loss_scale", self.factor)
        self.num_good = int(state.get("good_steps", 0))
