"""Positions in a whole tensor, as boxes: each has a start and a size for every dim.

A rank may hold some rows of a matrix, some columns, every third head, or a contiguous run of the flattened elements of
any of them. Each is a few boxes of the whole tensor. A file stores only boxes, and nothing of the plan.

    numbers 3 to 13, flattened, of 4 x 4      . . . a        a  1 x 1 at (0, 3)
                                              b b b b        b  2 x 4 at (1, 0)
                                              b b b b        c  1 x 1 at (3, 0)
                                              c . . .
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Places = NDArray[np.int64]


class Box(NamedTuple):
    """A box of a tensor."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.start, self.size, strict=True))

    @property
    def num_numbers(self) -> int:
        return prod(self.size)

    def find_overlap(self, other: "Box") -> "Box | None":
        """Return the intersection of two boxes, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        size = tuple(end - begin for begin, end in zip(start, stop, strict=True))
        return Box(start, size) if all(each > 0 for each in size) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices of this box within the tensor of an enclosing one."""
        return tuple(
            slice(start - first, start - first + size)
            for start, first, size in zip(self.start, outer.start, self.size, strict=True)
        )


def whole_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def run_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a contiguous run of flattened elements, in the order of the elements."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # The rows from `first` to before `last` are whole.

    def within(row: int, begin: int, end: int) -> Iterator[Box]:
        for box in run_boxes(shape[1:], begin - row * inner, end - row * inner):
            yield Box((row, *box.start), (1, *box.size))

    yield from within(first - 1, start, min(first * inner, stop))
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if first <= last:
        yield from within(last, last * inner, stop)


def placed(local: Box, numbers: Tensor, places: Sequence[Places]) -> Iterator[tuple[Box, Tensor]]:
    """Yield a box of a rank's own tensor as boxes of the whole tensor, each with its elements.

    `numbers` has the shape of the box. `places[dim]` maps each index of the rank's tensor to its index in the whole.
    Indices beyond its end are padding, which has no place in the whole.
    """
    runs = [list(_runs(each, start, size)) for each, start, size in zip(places, local.start, local.size, strict=True)]

    def cut(dim: int, start: tuple[int, ...], part: Tensor) -> Iterator[tuple[Box, Tensor]]:
        if dim == len(runs):
            yield Box(start, tuple(part.shape)), part
            return
        for at, place, length in runs[dim]:
            yield from cut(dim + 1, (*start, place), part.narrow(dim, at, length))

    yield from cut(0, (), numbers)


def _runs(places: Places, start: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the stretches of a dim that are contiguous in the whole: offset in the box, start in the whole, length."""
    held = places[start : start + size]
    breaks = np.flatnonzero(np.diff(held) != 1) + 1
    at = 0
    for run in np.split(held, breaks) if len(held) else []:
        yield at, int(run[0]), len(run)
        at += len(run)


def all_places(shape: Sequence[int]) -> list[Places]:
    """Return the places of a tensor that is not split: every index is its own."""
    return [np.arange(size, dtype=np.int64) for size in shape]


def views(numbers: Tensor, shape: Sequence[int], start: int, places: Sequence[Places]) -> Iterator[tuple[Box, Tensor]]:
    """Yield a rank's elements, those of its tensor of this shape from the flattened index `start` on, as boxes of the
    whole. The tensors are views: writes to them are writes to `numbers`.
    """
    numbers_flat = numbers.detach().view(-1)
    at = 0
    for local in run_boxes(shape, start, start + numbers_flat.numel()):
        stretch = numbers_flat[at : at + local.num_numbers].view(torch.Size(local.size))
        at += local.num_numbers
        yield from placed(local, stretch, places)
