"""All tokens of a sequence of which this rank has its piece: gathered when somebody reads them.

A module that is given them sees the whole: its shape, its type. Column layers read nothing of it. They take the piece,
and multiply what arrives of the others chunk by chunk (`communication.py`). Whoever else reads gets the whole first.
"""

from typing import Any

import torch
from torch import Tensor

from shardwise.ranks.collectives import Group
from shardwise.sharding.tensor.sequence_length import SequenceLength
from shardwise.torch_private import without_subclasses

#: What is asked of a tensor without looking at its numbers.
_FACTS: set[Any] = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_meta", "layout", "is_cuda")),
}


class LazyGather(Tensor):
    """Stands for all tokens, of which `piece` are those of this rank."""

    piece: Tensor
    length: SequenceLength
    group: Group
    _whole: Tensor | None

    @staticmethod
    def of(piece: Tensor, length: SequenceLength, group: Group) -> "LazyGather":
        shape = (*length.whole_shape(piece.shape[:-1]), piece.shape[-1])
        # One number of the right kind, spread out: there is nothing to read, and whoever still does will notice.
        made = piece.new_full((), torch.nan).expand(shape).as_subclass(LazyGather)
        made.piece, made.length, made.group, made._whole = piece, length, group, None
        return made

    def whole(self) -> Tensor:
        """The tokens of all ranks. Each rank computes a part from them, so gradients are summed."""
        if self._whole is None:
            self._whole = self.length.gather(self.piece, self.group, used_alike=False)
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
