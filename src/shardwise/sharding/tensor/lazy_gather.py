"""The lazy all-gather: a tensor of all tokens of which this rank holds a piece, gathered when its values are read.

A module that receives it sees the shape and dtype of the whole. Column layers do not read the whole: they take the
piece, and multiply the other pieces chunk by chunk as they arrive (`communication.py`). Any other read gathers first.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.ranks.collectives import Group, gather, scatter
from shardwise.torch_private import without_subclasses

#: Queries of a tensor that do not read its values.
_FACTS: set[Any] = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_meta", "layout", "is_cuda")),
}


class SequenceLength:
    """The number of sequences in one list of blocks, and their length. A piece shows neither.

    Tensors are (batch, tokens, channels), or (batch x tokens, channels) within some blocks.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.batch, self.tokens = group, 0, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceLength":
        return self  # A copy of a module runs within its original, on the same sequences.

    def note(self, whole: Tensor) -> None:
        """Record the shape of all tokens."""
        *lead, self.tokens = whole.shape[:-1]
        self.batch = prod(lead)

    def whole_shape(self, piece: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of all tokens, given that of a piece; both without channels."""
        return (*piece[:-1], self.tokens) if len(piece) > 1 else (self.batch * self.tokens,)

    def gather(self, piece: Tensor, *, used_alike: bool) -> Tensor:
        """Gather all tokens from the pieces of all ranks. `used_alike`: all ranks compute the same from them."""
        found = gather(self._by_sequence(piece), self.group, -2, used_alike=used_alike, length=self.tokens)
        return found.reshape(*self.whole_shape(piece.shape[:-1]), piece.shape[-1])

    def scatter(self, whole: Tensor) -> Tensor:
        """Return this rank's piece of all tokens."""
        found = scatter(self._by_sequence(whole), self.group, -2)
        return found.flatten(0, 1) if whole.dim() == 2 else found

    def _by_sequence(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() > 2 else tensor.reshape(self.batch, len(tensor) // self.batch, tensor.shape[-1])


class LazyGather(Tensor):
    """A stand-in for all tokens. `piece` holds those of this rank."""

    piece: Tensor
    length: SequenceLength
    _whole: Tensor | None

    @staticmethod
    def of(piece: Tensor, length: SequenceLength) -> "LazyGather":
        shape = (*length.whole_shape(piece.shape[:-1]), piece.shape[-1])
        # One expanded NaN of the right dtype: it takes no memory, and a read that bypasses the gather shows as NaN.
        made = piece.new_full((), torch.nan).expand(shape).as_subclass(LazyGather)
        made.piece, made.length, made._whole = piece, length, None
        return made

    def whole(self) -> Tensor:
        """Return the tokens of all ranks. Each rank computes a part from them, so their gradients are summed."""
        if self._whole is None:
            self._whole = self.length.gather(self.piece, used_alike=False)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func in _FACTS:
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        if func is Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return args[0].piece.requires_grad
        return func(*(_read(each) for each in args), **{key: _read(each) for key, each in (kwargs or {}).items()})


def _read(each: Any) -> Any:
    if isinstance(each, LazyGather):
        return each.whole()
    return type(each)(map(_read, each)) if type(each) in (list, tuple) else each
