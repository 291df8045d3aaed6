"""A forward in 16 bits, computed as it would be without their rounding."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.torch_private import EagerDispatchMode, pytree

_SIXTEEN = (torch.bfloat16, torch.float16)
#: Modules with more parameters are not computed again.
_MOST = 2**26


def is_small(module: nn.Module) -> bool:
    return sum(each.numel() for each in module.parameters()) <= _MOST


class Unrounded(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator takes 16-bit tensors as float32, and makes float32 where it would make 16 bits. For forwards that
    write nothing: what is written in place into 16-bit tensors is lost."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        args, kwargs = pytree.tree_map(_widened, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _widened(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.float() if given.dtype in _SIXTEEN else given
    return torch.float32 if given in _SIXTEEN and isinstance(given, torch.dtype) else given
