"""Channel-group analysis: tensors of labels, and the union-find over them.

A label tensor has the shape of the values that it describes, with one integer for each. It repeats along batch and
tokens, so its stride is 0 there and it is small. All operations on labels work on the distinct ones: for attention over
8,192 tokens, the labels of the weights alone would take gigabytes.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Labels along one dim.
Labels = NDArray[np.int64]

#: Operations that only move values. They are applied to labels as they are.
MOVES = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "slice", "select",
    "split", "split_with_sizes", "chunk", "unbind", "squeeze", "unsqueeze", "alias", "detach", "clone", "cat", "stack",
    "repeat", "flip", "roll", "narrow", "unfold", "diagonal", "movedim", "lift_fresh", "unflatten", "tril", "triu",
}  # fmt: skip
_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias"}


def moved(func: Any, name: str, labels: Any, kwargs: dict[str, Any], returned: Any) -> list[Tensor]:
    """Return the labels of the results of one of `MOVES`, given its arguments with labels for tensors."""
    if name in _RESHAPES:
        return [_reshaped(labels[0], returned.shape)]
    if name == "clone" and is_expanded(labels[0]):
        return [labels[0]]
    rest = {key: value for key, value in kwargs.items() if key == "dim"}
    if name == "cat" and len({each.dim() for each in labels[0]}) == 1:
        dim = labels[1] if len(labels) > 1 else rest.get("dim", 0)
        return [torch.cat(distinct(labels[0], but=dim), dim).expand(returned.shape)]
    found = func(*labels, **rest)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def distinct(labels: Sequence[Tensor], *, but: int | None = None) -> list[Tensor]:
    """Shrink to length 1 every dim along which all of these label tensors repeat, except dim `but`."""
    found = list(labels)
    count = found[0].dim()
    for dim in range(count):
        if all(each.stride(dim) == 0 for each in found) and (but is None or dim != but % count):
            found = [each.narrow(dim, 0, min(1, each.shape[dim])) for each in found]
    return found


def is_expanded(labels: Tensor) -> bool:
    """Whether labels repeat along a dim."""
    return any(stride == 0 and size > 1 for stride, size in zip(labels.stride(), labels.shape, strict=True))


def _reshaped(labels: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape labels. Leading and trailing dims that do not change keep their stride of 0."""
    old, new = list(labels.shape), list(shape)
    before = _num_equal(old, new)
    behind = _num_equal(old[before:][::-1], new[before:][::-1])
    kept = [(dim, dim) for dim in range(before)] + [(len(old) - dim, len(new) - dim) for dim in range(1, behind + 1)]
    for here, there in kept:
        if labels.stride(here) == 0 and old[here] > 1:
            labels, new[there] = labels.narrow(here, 0, 1), 1
    return labels.reshape(new).expand(shape)


def _num_equal(some: list[int], others: list[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


class UnionFind:
    """Labels, joined into channel groups (a union-find forest)."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        #: A cache of the root of every label; None after labels were made or joined.
        self._roots: Labels | None = None

    def new(self, count: int) -> int:
        """Make labels, each a group of its own, and return the first."""
        first, self._roots = len(self._parent), None
        self._parent += range(first, first + count)
        return first

    def find(self, label: int) -> int:
        parent = self._parent
        while parent[label] != label:
            parent[label] = label = parent[parent[label]]
        return label

    def join(self, some: Labels, others: Labels) -> None:
        """Join labels pairwise. -1 means no label."""
        both = (some >= 0) & (others >= 0) & (some != others)
        if both.any():
            self._roots = None
            # Encode each pair as one number, which keeps the order: sorting rows of two takes far longer.
            count = len(self._parent)
            pairs = np.unique(some[both] * count + others[both])
            for one, other in zip(*(each.tolist() for each in np.divmod(pairs, count)), strict=True):
                self._parent[self.find(one)] = self.find(other)

    def roots(self, labels: Labels) -> Labels:
        """Return the group of each label, named by its root label. -1 stays -1."""
        if self._roots is None:
            roots, above = np.empty(0, dtype=np.int64), np.array([*self._parent, -1], dtype=np.int64)
            while not np.array_equal(roots, above):
                roots, above = above, above[above]
            self._roots = roots
        return self._roots[labels]
