"""Gradients between steps: the step has been taken, and the next one begins with none.

A loop that was written for plain torch clips or changes them behind the backward. Behind `train_step` that has no
effect, and a run that was to be clipped would not be. So where a rank has whole gradients they are, until the engine
gets to work, of a class that refuses to be written. What leaves training alone is not refused: looks, zeroing, and a
clip that finds nothing to clip, by which norms are measured.
"""

from copy import deepcopy
from typing import Any

from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.torch_private import without_subclasses

#: What a gradient is made ready with to be written by somebody else, or begins the next step with.
_WITHOUT_EFFECT = frozenset(["zero_", "_foreach_zero_", "detach_", "requires_grad_"])
_SCALING = frozenset(["mul_", "div_", "_foreach_mul_", "_foreach_div_", "__imul__", "__itruediv__"])
_KIND: Any = Tensor
#: What gives the same memory once more.
_SAME = (_KIND.data.__get__, Tensor.detach)


class SpentGradient(Tensor):
    """A gradient that its step was taken by."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if _writes(func, args):
            raise ShardwiseError(
                "a gradient is written between steps of the engine, which has no effect: engine.train_step(batch) has"
                " taken the step already, and the next one begins with none",
                remedy="clip=1.0 in sw.parallelize, to clip; what else changes gradients in step() of an optimizer, or"
                " in a hook of the parameter that multiplies; engine.gradient_norm to look",
            )
        with without_subclasses():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func in _SAME else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with without_subclasses():
            return deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_subclasses():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _writes(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function changes the numbers of its first argument, which is such a gradient, or has some."""
    name = getattr(function, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    if not (is_in_place or name in ("__imul__", "__iadd__", "__isub__", "__itruediv__", "__setitem__")):
        return False
    first = args[0][:1] if isinstance(args[0], (list, tuple)) else args[:1]
    if name in _WITHOUT_EFFECT or not any(isinstance(each, SpentGradient) for each in first):
        return False
    if name == "fill_":
        return bool(args[1:] != (0,))
    factor = args[1] if name in _SCALING and len(args) > 1 else None
    if isinstance(factor, Tensor):
        return factor.numel() != 1 or float(factor) != 1.0
    return factor != 1
