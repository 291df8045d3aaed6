"""Lazy logits: hidden states and the weight of a head, which look like their product until its values are needed.

    hidden ── LazyLogits ── float, view, [:, :-1], / 8, cap tanh(. / cap) ── cross_entropy ── loss     never whole
                   └── any other operation ── hidden W^T, once ── the recorded operations, replayed

Operations that act on each word separately are recorded: a cast, a factor, a soft cap, reshapes, and selections of
tokens. Torch's cross entropy then becomes the fused head and loss (`linear_cross_entropy.py`). Any other operation
computes the logits once and replays the recorded operations on them, so that views stay views and copies stay copies.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.kernels.choose import autocast_type, takes_kernel
from shardwise.kernels.linear_cross_entropy import Ranks, linear_cross_entropy
from shardwise.torch_private import without_subclasses

#: Properties that do not need the values of logits, and are those of the hidden states.
_FACTS: set[Any] = {
    Tensor.is_floating_point,
    Tensor.dim,
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "ndim", "requires_grad", "is_meta", "layout", "is_leaf", "is_cuda")
    ),
}
_TIMES = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul}
_OVER = {Tensor.div, Tensor.__truediv__, Tensor.true_divide, torch.div}
_CASTS = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}
_SHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.__getitem__}
_IS_BEFORE_A_LOSS: ContextVar[bool] = ContextVar("is_before_a_loss", default=False)
_LOSS_ORDER = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head: a weight of [words, width], and the dtype in which a linear layer would compute.

    If the words are sharded over ranks, `ranks` says how, and `shown` turns this rank's logits into those users see.
    """

    weight: Tensor
    computing: torch.dtype
    ranks: Ranks | None = None
    shown: Callable[[Tensor], Tensor] | None = None

    @property
    def words(self) -> int:
        return self.weight.shape[0] if self.ranks is None else self.ranks.words


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """The elementwise operations so far: `factor` before a tanh, `cap` after it, and a cast."""

    dtype: torch.dtype
    factor: float = 1.0
    has_tanh: bool = False
    cap: float = 1.0

    def times(self, number: float) -> "_Done":
        factor, cap = (1.0, number) if self.has_tanh else (number, 1.0)
        return _Done(dtype=self.dtype, factor=self.factor * factor, has_tanh=self.has_tanh, cap=self.cap * cap)


class LazyLogits(Tensor):
    """Hidden states that behave as their logits."""

    head: Head
    _done: _Done
    #: The logits, once they have been computed.
    _logits: Tensor | None
    #: The logits that these were derived from, and the operation.
    _from: "tuple[LazyLogits, Callable[[Tensor], Tensor]] | None"
    _made: "list[weakref.ref[LazyLogits]]"

    @staticmethod
    def of(hidden: Tensor, head: Head) -> "LazyLogits":
        return _make(hidden, head, _Done(dtype=head.computing))

    def whole(self) -> Tensor:
        """Compute all logits, once, and with them all derived ones that still exist."""
        if self._logits is None:
            if self._from is not None:
                self._from[0].whole()
            else:
                self._take(self._product())
        assert self._logits is not None, "what is asked for is there, so it was made with its origin"
        return self._logits

    @property
    def is_read(self) -> bool:
        return self._logits is not None

    def on_gradient(self, hook: Callable[[Tensor], None]) -> None:
        """Register a hook for the gradient that arrives here, without computing the logits."""
        with without_subclasses():
            self.register_hook(hook)  # type: ignore[no-untyped-call]

    def _hidden(self) -> Tensor:
        with without_subclasses():
            return self.as_subclass(Tensor).to(self.head.computing)

    def _product(self) -> Tensor:
        with torch.autocast(self.head.weight.device.type, enabled=False):
            made = functional.linear(self._hidden(), self.head.weight.to(self.head.computing))
        return made if self.head.shown is None else self.head.shown(made)

    def _take(self, logits: Tensor) -> None:
        self._logits = logits
        for reference in self._made:
            each = reference()
            if each is not None:
                assert each._from is not None, "it was made of these"
                each._take(each._from[1](logits))

    def _note(self, hidden: Tensor, done: _Done, make: Callable[[Tensor], Tensor]) -> "LazyLogits":
        """Record logits that are derived from these."""
        other = _make(hidden, self.head, done)
        other._from = self, make
        self._made = [each for each in self._made if each() is not None]
        self._made.append(weakref.ref(other))
        return other

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        given = args[0] if args and isinstance(args[0], LazyLogits) else kwargs.get("input")
        if isinstance(given, LazyLogits) and not given.is_read:
            rest = args[1:] if args else ()
            found = _fact(given, func, args, kwargs)
            if found is None:
                found = _noted(given, func, rest, kwargs)
            if found is None and func is functional.cross_entropy:
                found = _loss(given, rest, kwargs)
            if found is not None:
                return found
        return func(*map(_read, args), **{key: _read(each) for key, each in kwargs.items()})


def _make(hidden: Tensor, head: Head, done: _Done) -> LazyLogits:
    with without_subclasses():
        made = hidden.as_subclass(LazyLogits)
    if made is hidden:  # The same object, which must not be modified.
        made = hidden.view_as(hidden).as_subclass(LazyLogits)
    made.head, made._done, made._logits, made._from, made._made = head, done, None, None, []
    return made


def _read(each: Any) -> Any:
    """Replace lazy logits among arguments by their values."""
    if isinstance(each, LazyLogits):
        return each.whole()
    return type(each)(map(_read, each)) if type(each) in (list, tuple) else each


def _fact(given: LazyLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a property that is known without computing the logits; None if `func` asks for anything else."""
    with without_subclasses():
        if func in _FACTS:
            return func(*args, **kwargs)
        shape = torch.Size((*Tensor.size(given)[:-1], given.head.words))
    if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
        return given._done.dtype
    if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
        return shape
    if func is Tensor.numel:
        return prod(shape)
    if func is Tensor.size:
        rest = (*args[1:], *kwargs.values())
        return shape[rest[0]] if rest and rest[0] is not None else shape
    return None


def _noted(given: LazyLogits, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    """Record an operation; None if it mixes words or needs values."""
    done = _elementwise(given._done, func, rest, kwargs)
    with without_subclasses():
        hidden = given.as_subclass(Tensor)
        if done is None:
            if func in _SHAPES and not kwargs and (made := reshaped(func, hidden, given.head.words, rest)) is not None:
                hidden, done = made, given._done
            elif func is Tensor.contiguous and not rest and not kwargs:
                done = given._done
    if done is None:
        return None
    return given._note(hidden, done, lambda logits: func(logits, *rest, **kwargs))


def _elementwise(done: _Done, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> _Done | None:
    if func in _CASTS and not rest and not kwargs:
        return _cast(done, _CASTS[func])
    if func is Tensor.to and len(rest) == 1 and isinstance(rest[0], torch.dtype) and not kwargs:
        return _cast(done, rest[0])
    if func in _TIMES | _OVER and len(rest) == 1 and isinstance(rest[0], Real) and not kwargs:
        number = float(rest[0])
        # A soft cap must be positive.
        return None if number <= 0 else done.times(number if func in _TIMES else 1 / number)
    if func in (Tensor.tanh, torch.tanh) and not rest and not kwargs and not done.has_tanh:
        return _Done(dtype=done.dtype, factor=done.factor, has_tanh=True)
    return None


def _cast(done: _Done, dtype: torch.dtype) -> _Done | None:
    """Record a cast only to the same or higher precision: rounding to a lower one would be lost."""
    if dtype != done.dtype and dtype != torch.float32:
        return None
    return _Done(dtype=dtype, factor=done.factor, has_tanh=done.has_tanh, cap=done.cap)


def reshaped(func: Any, tokens: Tensor, words: int, rest: tuple[Any, ...]) -> Tensor | None:
    """Reshape hidden states as if their last dim were `words`; None if the operation changes that dim."""
    if func is Tensor.__getitem__:
        return tokens[rest[0]] if picks_tokens(rest[0], tokens.dim()) else None
    if func in (Tensor.flatten, torch.flatten):
        if len(rest) < 2 or rest[1] % tokens.dim() == tokens.dim() - 1:
            return None
        return tokens.flatten(*rest)
    shape = list(rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest)
    if not all(isinstance(each, int) for each in shape) or len(shape) < 2 or shape[-1] not in (words, -1):
        return None
    if shape[-1] == -1 and prod(shape[:-1]) * tokens.shape[-1] != tokens.numel():
        return None
    return tokens.reshape(*shape[:-1], tokens.shape[-1])


def picks_tokens(index: Any, num_dims: int) -> bool:
    """Whether an index consists of integers and slices, and keeps the whole last dim."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(each, (int, slice)) or each is Ellipsis for each in parts):
        return False
    if parts.count(Ellipsis) == 1:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (num_dims - len(parts) + 1)
    return len(parts) < num_dims or parts[-1] == slice(None)


def _loss(given: LazyLogits, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Compute torch's cross entropy of [tokens, words] by the fused kernel; None if it is not of that form."""
    named = {**dict(zip(_LOSS_ORDER, rest, strict=False)), **kwargs}
    named.pop("input", None)
    target, reduction = named.pop("target"), named.get("reduction", "mean")
    legacy = [named.pop(key, None) for key in ("size_average", "reduce")]
    head, done, hidden = given.head, given._done, given._hidden()
    weight = named.pop("weight", None)
    if any(each is not None for each in legacy) or reduction not in ("mean", "sum") or hidden.dim() != 2:
        return None
    if not isinstance(target, Tensor) or target.is_floating_point() or target.shape != hidden.shape[:1]:
        return None
    if isinstance(target, LazyLogits) or (weight is not None and head.ranks is not None):
        return None
    if not takes_kernel("linear_cross_entropy", hidden, head.weight, target, weight):
        return None
    factor = done.factor * (done.cap if done.has_tanh else 1.0)
    with torch.autocast(head.weight.device.type, enabled=False):
        loss = linear_cross_entropy(
            hidden if factor == 1.0 else hidden * factor,
            head.weight.to(head.computing),
            target,
            class_weight=weight,
            softcap=done.cap if done.has_tanh else None,
            ranks=head.ranks,
            **named,
        )
    return loss.to(done.dtype)


@contextmanager
def before_a_loss() -> Iterator[None]:
    """Declare that a loss follows although gradients are disabled (evaluation): logits are lazy as in training. For a
    prediction, where the logits are the result, they are not."""
    token = _IS_BEFORE_A_LOSS.set(True)
    try:
        yield
    finally:
        _IS_BEFORE_A_LOSS.reset(token)


def may_wait(hidden: Tensor, weight: Tensor, *, training: bool) -> bool:
    """Whether logits may be lazy: in training or before an evaluation's loss, if the kernel supports these tensors."""
    has_loss = (training and torch.is_grad_enabled()) or _IS_BEFORE_A_LOSS.get()
    if not has_loss or torch.compiler.is_compiling():
        return False
    # Casting the weight in every step costs more than whole logits and a compiled loss: with lazy logits a Llama-1B on
    # an H200 ran at 95 % of the speed, and saved 4 GiB.
    if autocast_type(hidden.device) not in (None, weight.dtype):
        return False
    return takes_kernel("linear_cross_entropy", hidden, weight)


def waiting(hidden: Tensor, weight: Tensor, ranks: Ranks | None = None, shown: Any = None) -> LazyLogits:
    computing = autocast_type(hidden.device) or hidden.dtype
    return LazyLogits.of(hidden, Head(weight=weight, computing=computing, ranks=ranks, shown=shown))
