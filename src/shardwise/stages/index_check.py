"""Raise where an index is out of range: a trial hides labels, and does not know what a module does with them.

On the host torch raises by itself. A GPU would be unusable after it.
"""

from typing import Any

import torch
from torch import Tensor

from shardwise.torch_private import EagerDispatchMode

aten = torch.ops.aten
#: By operation, the places of the indices, and whether they may count from the end.
_INDEXED = {
    aten.embedding.default: (1, False),
    aten.gather.default: (2, False),
    aten.index_select.default: (2, False),
    aten.scatter.src: (2, False),
    aten.scatter.value: (2, False),
    aten.scatter_add.default: (2, False),
    aten.index_add.default: (2, False),
    aten.index.Tensor: (1, True),
    aten.index_put.default: (1, True),
    aten.index_put_.default: (1, True),
}


class IndexCheck(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Raises IndexError for a hidden label that is used as an index on a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        place, from_end = _INDEXED.get(func, (None, False))
        if place is not None and len(args) > place:
            given = args[place] if isinstance(args[place], (list, tuple)) else [args[place]]
            sizes = args[0].shape if from_end else ()
            for dim, each in enumerate(given):
                if isinstance(each, Tensor) and each.is_cuda and each.dtype in (torch.int64, torch.int32):
                    least = -sizes[dim] if dim < len(sizes) else 0
                    lowest = int(each.min()) if each.numel() else 0
                    if lowest < least:
                        raise IndexError(f"{lowest} is an index of {func}")
        return func(*args, **(kwargs or {}))
