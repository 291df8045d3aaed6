"""The output layer (LM head): its logits are lazy until their loss (`kernels/lazy_logits.py`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.kernels.lazy_logits import may_wait, waiting


@dataclass(frozen=True, slots=True)
class HeadForward:
    def __call__(self, module: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(given, Tensor) or not may_wait(given, module.weight, training=module.training):
            return own(module, *args, **kwargs)
        return waiting(given, module.weight)

    def __str__(self) -> str:
        return "head, its logits never whole in a cross entropy"


def find_head(module: nn.Module, words: set[int]) -> HeadForward | str | None:
    """Return the replacement of a layer with as many outputs as an embedding has words, or the reason against it."""
    if type(module) is not nn.Linear or module.out_features not in words:
        return None
    has_bias = "bias" in dict(module.named_parameters())
    return "it has a bias" if has_bias else HeadForward()
