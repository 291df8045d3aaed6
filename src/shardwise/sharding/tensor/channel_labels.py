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
    """Labels, joined into channel groups: a union-find forest, in which whole arrays of labels are joined at once.

    Wide models have millions of labels. A root is the smallest label of its group.
    """

    def __init__(self) -> None:
        self._count = 0
        #: By label; longer than the labels that there are, so that it rarely grows.
        self._parent: Labels = np.empty(0, dtype=np.int64)
        #: A cache of the root of every label, and -1 behind them; None after labels were made or joined.
        self._roots: Labels | None = None

    def new(self, count: int) -> int:
        """Make labels, each a group of its own, and return the first."""
        first, self._roots = self._count, None
        self._count += count
        if self._count > len(self._parent):
            more = np.arange(len(self._parent), 2 * self._count)
            self._parent = np.concatenate([self._parent, more])
        return first

    def join(self, some: Labels, others: Labels) -> None:
        """Join labels pairwise. -1 means no label."""
        both = (some >= 0) & (others >= 0) & (some != others)
        ones, twos = some[both], others[both]
        while len(ones):
            self._roots = None
            ones, twos = self._find(ones), self._find(twos)
            apart = ones != twos
            ones, twos = ones[apart], twos[apart]
            # The smallest wins where several roots are joined to one; the others find it in the next turn.
            np.minimum.at(self._parent, np.maximum(ones, twos), np.minimum(ones, twos))

    def roots(self, labels: Labels) -> Labels:
        """Return the group of each label, named by its root label. -1 stays -1."""
        if self._roots is None:
            self._roots = np.append(self._find(np.arange(self._count)), -1)
        return self._roots[labels]

    def _find(self, labels: Labels) -> Labels:
        """Return the roots of labels, which become their parents."""
        above = self._parent[labels]
        while True:
            further = self._parent[above]
            if np.array_equal(above, further):
                return above
            self._parent[labels] = above = further
