"""What stands for a tensor's values while a module is looked at: of its shape, with a whole number for each.

Along batch and tokens a shadow repeats, so it has a stride of 0 there and is small. Whatever is done to shadows is done
to what is distinct of them: of attention over 8,192 tokens the weights alone would have a shadow of gigabytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: They only move values: what they do to values they do to shadows.
MOVES = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "slice", "select",
    "split", "split_with_sizes", "chunk", "unbind", "squeeze", "unsqueeze", "alias", "detach", "clone", "cat", "stack",
    "repeat", "flip", "roll", "narrow", "unfold", "diagonal", "movedim", "lift_fresh", "unflatten", "tril", "triu",
}  # fmt: skip
_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias"}


def moved(func: Any, name: str, shadows: Any, kwargs: dict[str, Any], returned: Any) -> list[Tensor]:
    """What one of `MOVES` makes of its arguments' shadows."""
    if name in _RESHAPES:
        return [_reshaped(shadows[0], returned.shape)]
    if name == "clone" and is_expanded(shadows[0]):
        return [shadows[0]]
    rest = {key: value for key, value in kwargs.items() if key == "dim"}
    if name == "cat" and len({each.dim() for each in shadows[0]}) == 1:
        dim = shadows[1] if len(shadows) > 1 else rest.get("dim", 0)
        return [torch.cat(distinct(shadows[0], but=dim), dim).expand(returned.shape)]
    found = func(*shadows, **rest)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def distinct(shadows: Sequence[Tensor], *, but: int | None = None) -> list[Tensor]:
    """Shadows of one shape, with a length of 1 along every dim, but for one, along which all of them repeat."""
    found = list(shadows)
    count = found[0].dim()
    for dim in range(count):
        if all(each.stride(dim) == 0 for each in found) and (but is None or dim != but % count):
            found = [each.narrow(dim, 0, min(1, each.shape[dim])) for each in found]
    return found


def is_expanded(shadow: Tensor) -> bool:
    """Whether a shadow repeats along a dim."""
    return any(stride == 0 and size > 1 for stride, size in zip(shadow.stride(), shadow.shape, strict=True))


def _reshaped(shadow: Tensor, shape: Sequence[int]) -> Tensor:
    """A shadow in another shape. Where dims at the beginning and the end stay what they are, they go on repeating."""
    old, new = list(shadow.shape), list(shape)
    before = _num_equal(old, new)
    behind = _num_equal(old[before:][::-1], new[before:][::-1])
    kept = [(dim, dim) for dim in range(before)] + [(len(old) - dim, len(new) - dim) for dim in range(1, behind + 1)]
    for here, there in kept:
        if shadow.stride(here) == 0 and old[here] > 1:
            shadow, new[there] = shadow.narrow(here, 0, 1), 1
    return shadow.reshape(new).expand(shape)


def _num_equal(some: list[int], others: list[int]) -> int:
    """How many numbers at the beginning of both are the same."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        count += 1
    return count
