"""Refuse labels below 0 where they are used as indices: a trial hides labels, and does not know what a module does.

On the host torch raises by itself. A GPU would be unusable after it, so there only operations pass that are known to
take any number: elementwise ones, views and copies, losses that ignore the label, and indices that count from the end.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_private import LOCAL_SCALAR, TO_COPY, EagerDispatchMode, pytree

aten = torch.ops.aten
_LOSSES = {aten.nll_loss_forward.default: 4, aten.nll_loss2d_forward.default: 4}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
#: Besides elementwise operations and views.
_HARMLESS = {
    aten.clone.default, TO_COPY.default, aten.copy_.default, aten.cat.default, aten.stack.default,
    aten.sum.default, aten.sum.dim_IntList, aten.any.default, aten.all.default, aten.max.default, aten.min.default,
    aten.nonzero.default, aten.constant_pad_nd.default, LOCAL_SCALAR.default, aten.roll.default,
    aten.new_zeros.default, aten.new_full.default, aten.full_like.default, aten.zeros_like.default,
    aten.ones_like.default, aten.empty_like.default, aten.masked_select.default,
}  # fmt: skip


class IndexCheck(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Raises IndexError before an operation on a device of this kind that could take a label below 0 for an index."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        is_harmless = func in _HARMLESS or torch.Tag.pointwise in func.tags or func.is_view
        for each, least in () if is_harmless else self._integers(func, args, kwargs or {}):
            if int(each.min()) < least:
                raise IndexError(f"{func} is given {int(each.min())}, which may be an index")
        return func(*args, **(kwargs or {}))

    def _integers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, int]]:
        """Yield the integers that an operation may take for indices, with the lowest that it can."""
        if func in _INDEXED:
            pairs = [(each, -size) for each, size in zip(args[1], args[0].shape, strict=False)]
        elif func in _LOSSES:
            target, ignored = args[1], args[_LOSSES[func]]
            pairs = [(target[target != ignored], 0)]
        else:
            pairs = [(each, 0) for each in pytree.tree_leaves((args, kwargs))]
        for each, least in pairs:
            if isinstance(each, Tensor) and each.device.type == self._device and each.numel() and _is_integer(each):
                yield each, least


def _is_integer(each: Tensor) -> bool:
    return each.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
