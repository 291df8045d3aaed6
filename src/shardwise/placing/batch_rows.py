"""Batches as a forward is called with them: tensors by name, or inside of lists, tuples and dictionaries."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.stages import batch as plain
from shardwise.stages.batch import Padding
from shardwise.stages.stage import Batch
from shardwise.torch_private import pytree


def rows_of(batch: Batch) -> int:
    """Return the number of rows: the first dim of its first tensor."""
    return plain.length_of(_flat(batch)[0])


def home_of(batch: Batch) -> torch.device:
    """Return the device of its tensors."""
    return plain.home_of(_flat(batch)[0])


def cut_rows(batch: Batch, num_microbatches: int) -> list[Batch]:
    """Return the microbatches. Tensors with a row for each of the batch's are cut, at any depth; all else goes to
    each."""
    entries, tree = _flat(batch)
    found: list[Batch] = []
    for cut in plain.cut_batch(entries, num_microbatches, pad=True):
        microbatch = pytree.tree_unflatten(list(cut.values()), tree)
        found.append(Padding(microbatch) if isinstance(cut, Padding) else microbatch)
    return found


def few_rows(batch: Batch, number: int) -> tuple[Batch, list[Batch]]:
    """Return about `number` rows of a batch together, and in two parts."""
    length = rows_of(batch)
    halves = cut_rows(batch, max(2, 2 * length // number))[:2]
    every, tree = _flat(batch)
    parts = [list(_flat(each)[0].values()) for each in halves]

    def together(whole: Any, one: Any, other: Any) -> Any:
        if not is_cut(whole, one):
            return whole
        return torch.cat((one, other)) if isinstance(whole, Tensor) else type(whole)((*one, *other))

    leaves = [together(*each) for each in zip(every.values(), *parts, strict=True)]
    return pytree.tree_unflatten(leaves, tree), halves


def is_cut(whole: Any, part: Any) -> bool:
    """Whether an entry of a microbatch is a part of that of the batch."""
    return isinstance(whole, Tensor) and whole.dim() > 0 and len(part) != len(whole)


def inputs_with_gradient(batch: Batch) -> list[str]:
    """Return the entries that require a gradient."""
    for name, entry in batch.items():
        inside = [] if isinstance(entry, Tensor) else pytree.tree_leaves(entry)
        if any(isinstance(each, Tensor) and each.requires_grad for each in inside):
            raise ShardwiseError(
                f"a tensor inside of {name} wants a gradient, and with several microbatches only arguments that are"
                " tensors themselves get one",
                remedy=f"{name} as arguments of their own, or microbatches=1",
            )
    return [name for name, entry in batch.items() if isinstance(entry, Tensor) and entry.requires_grad]


def _flat(batch: Batch) -> tuple[Mapping[str, Any], Any]:
    leaves, tree = pytree.tree_flatten(dict(batch))
    return {str(number): leaf for number, leaf in enumerate(leaves)}, tree
