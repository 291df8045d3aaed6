"""A second batch like the example, with other values: comparing runs of both shows what depends on data."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.stages.split.outline import leaves_of
from shardwise.stages.stage import Batch
from shardwise.torch_private import pytree


def second_batch(first: Batch, others: Sequence[Batch] = ()) -> Batch:
    """Return one of the others if it differs, else the example with its values rearranged.

    The new values are taken from the batch, so that an index stays a valid index, and a label a valid label.
    """
    for each in reversed(others):
        if not _are_same(first, each):
            return each
    length = _length(first)
    mixed: Batch = pytree.tree_map(lambda each: _mixed(each, length), dict(first))
    if not _are_same(first, mixed):
        return mixed
    turned: Batch = pytree.tree_map(lambda each: _turned(each, length), dict(first))
    return turned


def turned_round(batch: Batch) -> Batch:
    """Return the batch with every row in another place: the last one is first."""
    length = _length(batch)
    made: Batch = pytree.tree_map(
        lambda each: each.detach().roll(1, 0) if _has_rows(each, length) else each, dict(batch)
    )
    return made


def twice(batch: Batch) -> Batch:
    """Return a batch with every row twice."""
    length = _length(batch)
    made: Batch = pytree.tree_map(
        lambda each: torch.cat([each.detach()] * 2) if _has_rows(each, length) else each, dict(batch)
    )
    return made


def _length(batch: Batch) -> int:
    return next((len(each) for each in leaves_of(dict(batch)) if isinstance(each, Tensor) and each.dim()), 0)


def _mixed(entry: Any, length: int) -> Any:
    """Return the rows of the second half twice each, in reverse, and none of the first half; scale floats by 0.75."""
    if not _has_rows(entry, length):
        return entry
    others = [length - 1 - number // 2 for number in range(length)]
    # No row is in its own place, or what is made of it alone would be the same.
    rows = [length - 1 if other == number else other for number, other in enumerate(others)]
    made = entry.detach()[torch.tensor(rows, device=entry.device)]
    return (made * 0.75 if made.is_floating_point() else made).requires_grad_(entry.requires_grad)


def _turned(entry: Any, length: int) -> Any:
    """Do the same within each row, for batches whose rows are all equal."""
    if not _has_rows(entry, length) or entry.dim() < 2 or entry.is_floating_point():
        return entry
    width = entry.shape[1]
    return entry[:, torch.tensor([width - 1 - number // 2 for number in range(width)], device=entry.device)]


def _has_rows(entry: Any, length: int) -> bool:
    return isinstance(entry, Tensor) and entry.layout is torch.strided and entry.dim() > 0 and len(entry) == length


def _are_same(one: Batch, other: Batch) -> bool:
    pairs = zip(leaves_of(dict(one)), leaves_of(dict(other)), strict=False)
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in tensors)
