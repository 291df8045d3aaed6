"""Compare values that a forward may have changed, and describe a change."""

from collections.abc import Collection
from operator import is_
from typing import Any

import torch
from torch import Tensor


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one is not other:
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return alike and not one.is_meta and torch.equal(one, other)
    if isinstance(one, (bool, int, float, str)) and type(one) is type(other):
        return bool(one == other) or (one != one and other != other)
    return one is other


def told(before: Any, now: Any) -> str:
    """Describe a change in a few words."""
    if isinstance(now, (bool, int, float, str)):
        return f"{type(now).__name__} {now!r}"[:40] if before is None else f"{before!r}, then {now!r}"[:60]
    return f"a {type(now).__name__}"


def repeats(tensor: Tensor) -> bool:
    """Whether elements share memory (`expand`), so that torch does not write to it."""
    return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def is_same_list(holder: Collection[Any], content: Collection[Any]) -> bool:
    return len(holder) == len(content) and all(map(is_, holder, content))
