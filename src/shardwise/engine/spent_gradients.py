"""Gradients between steps: the step has been taken, and the next one begins with none.

A loop that was written for plain torch clips or changes them behind the backward. Behind `train_step` that has no
effect, and a run that was to be clipped would not be. So where a rank has whole gradients they are, until the engine
gets to work, of a class that refuses to be written. What leaves training alone is not refused: looks, zeroing, and a
clip that finds nothing to clip, by which norms are measured.

Others are put in their places (`p.grad = p.grad * 0.5`), which no tensor is asked about. Of a few parameters it is
known what the engine left there, and whether a backward of the script's own came by meanwhile: its gradients are its
own business, as are those that another optimizer has stepped by.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.torch_private import version_of, without_subclasses

#: Of so many parameters it is known. Scripts that change gradients go over all; a hook takes 3 microseconds.
_NUM_WATCHED = 8
_REMEDY = (
    "clip=1.0 in sw.parallelize, to clip; what else changes gradients in step() of an optimizer, or in a hook of the"
    " parameter that multiplies; engine.gradient_norm to look"
)

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


def check_put(name: str, gradient: Tensor) -> None:
    """Refuse a gradient that is put where the engine has none; zeros are none."""
    if bool(gradient.count_nonzero()):
        raise _put(name)


def _put(name: str) -> ShardwiseError:
    return ShardwiseError(
        f"{name}.grad was set between steps of the engine, which has no effect: engine.train_step(batch) has taken the"
        " step already, and the next one begins with none",
        remedy=f"{_REMEDY}; p.grad = None for every parameter, if it is for something else",
    )


class _Left(NamedTuple):
    """What the engine has left in the place of a parameter's gradient, and how often that was written."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor | None
    version: int


class GradientPlaces:
    """The places of a few parameters' gradients, from one step to the next."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        every = list(parameters.items())
        apart = max(1, len(every) // _NUM_WATCHED)
        self._watched = dict([*every[::apart][: _NUM_WATCHED - 1], *every[-1:]])
        self._left: list[_Left] = []
        self._handles: list[Any] = []
        #: The parameters that a backward has come to since.
        self._met: set[int] = set()

    def leave(self) -> None:
        """A step is over."""
        self.forget()
        with without_subclasses():
            for name, each in self._watched.items():
                if each.requires_grad:
                    self._left.append(_Left(name, each, each.grad, version_of(each)))
                    handle = each.register_post_accumulate_grad_hook(self._meet)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)

    def forget(self) -> None:
        """Nobody wants to know any more."""
        for each in self._handles:
            each.remove()
        self._handles.clear()
        self._left.clear()
        self._met.clear()

    def check(self) -> None:
        """Refuse gradients that somebody has put there: the step that begins now begins with none."""
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
            return False  # Somebody has made a step by it.
        is_same = left.gradient is not None and now.shape == left.gradient.shape and bool((now == left.gradient).all())
        return not is_same and bool(now.count_nonzero())
