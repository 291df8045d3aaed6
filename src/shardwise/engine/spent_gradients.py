"""Refuse writes to gradients between steps: the step has been taken, and the next one begins without gradients.

A loop written for plain torch clips or changes gradients after the backward. After `train_step` that has no effect, and
a run would silently not be clipped. So if a rank has whole gradients, they have a class that refuses writes until the
engine starts to work. Operations without effect on training are allowed: reads, zeroing, and a clip that does not clip,
which measures the norm.

An assignment (`p.grad = p.grad * 0.5`) calls no tensor function, so it cannot be intercepted. Instead, for a few
parameters the engine remembers the gradient that it left there, and whether a backward of the script itself has run
since: the script's own gradients are allowed, as are those that another optimizer has stepped with.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.weak_hook import when_accumulated
from shardwise.torch_private import version_of, without_subclasses

#: The number of watched parameters: a script that changes gradients changes all, and a hook takes 3 microseconds.
_NUM_WATCHED = 8
_REMEDY = (
    "clip=1.0 in sw.parallelize, to clip; what else changes gradients in step() of an optimizer, or in a hook of the"
    " parameter that multiplies; engine.gradient_norm to look"
)

#: In-place functions that are allowed: they prepare a gradient for other code, or for the next step.
_WITHOUT_EFFECT = frozenset(["zero_", "_foreach_zero_", "detach_", "requires_grad_"])
_SCALING = frozenset(["mul_", "div_", "_foreach_mul_", "_foreach_div_", "__imul__", "__itruediv__"])
_KIND: Any = Tensor
#: Functions that return the same memory.
_SAME = (_KIND.data.__get__, Tensor.detach)


class SpentGradient(Tensor):
    """A gradient whose optimizer step has been taken."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if _writes(func, args):
            raise ShardwiseError(
                "a gradient is written between steps of the engine, which has no effect: engine.train_step(batch) has"
                " taken the step already, and the next one begins with none",
                remedy=_REMEDY,
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
    """Whether a function changes its first argument, which is a spent gradient or a list of them."""
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


def check_put(name: str, gradient: Tensor) -> None:
    """Refuse a gradient assigned where the engine has none; zeros are allowed."""
    if bool(gradient.count_nonzero()):
        raise _put(name)


def _put(name: str) -> ShardwiseError:
    return ShardwiseError(
        f"{name}.grad was set between steps of the engine, which has no effect: engine.train_step(batch) has taken the"
        " step already, and the next one begins with none",
        remedy=f"{_REMEDY}; p.grad = None for every parameter, if it is for something else",
    )


class _Left(NamedTuple):
    """The gradient that the engine left at a parameter, and the version of the parameter then."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor | None
    version: int


class GradientPlaces:
    """Watches the `grad` of a few parameters from one step to the next."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        every = list(parameters.items())
        apart = max(1, len(every) // _NUM_WATCHED)
        self._watched = dict([*every[::apart][: _NUM_WATCHED - 1], *every[-1:]])
        self._left: list[_Left] = []
        self._handles: list[Any] = []
        #: Ids of parameters that a backward has reached since.
        self._met: set[int] = set()

    def leave(self) -> None:
        """Start watching: a step is over."""
        self.forget()
        with without_subclasses():
            for name, each in self._watched.items():
                if each.requires_grad:
                    self._left.append(_Left(name, each, each.grad, version_of(each)))
                    self._handles.append(when_accumulated(each, self._meet))

    def forget(self) -> None:
        """Stop watching."""
        for each in self._handles:
            each.remove()
        self._handles.clear()
        self._left.clear()
        self._met.clear()

    def check(self) -> None:
        """Refuse gradients that a script has assigned: the step that begins now begins without gradients."""
        with without_subclasses():
            found = [each.name for each in self._left if self._is_put(each)]
        self.forget()
        if found:
            raise _put(found[0])

    def _meet(self, parameter: Tensor) -> None:
        self._met.add(id(parameter))

    def _is_put(self, left: _Left) -> bool:
        now = left.parameter.grad
        if now is None or now is left.gradient or id(left.parameter) in self._met:
            return False
        if version_of(left.parameter) != left.version:
            return False  # Another optimizer has stepped with it.
        is_same = left.gradient is not None and now.shape == left.gradient.shape and bool((now == left.gradient).all())
        return not is_same and bool(now.count_nonzero())
