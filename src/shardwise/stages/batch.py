"""A batch: cut into microbatches, and where it is."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.stages.stage import Batch


class Padding(dict):  # type: ignore[type-arg]
    """A microbatch that repeats a row for want of another: it is run like any other, and counts for nothing."""


def cut_batch(batch: Batch, num_microbatches: int, *, pad: bool = False) -> list[Batch]:
    """Return the microbatches: tensors that have the batch's length are cut along it, all else goes to each.

    The batch's length is the first dimension of its first tensor. With `pad` any length will do: some microbatches have
    one row more than others, and if there are fewer rows than microbatches the last ones are `Padding`.
    """
    length = length_of(batch)
    size, more = divmod(length, num_microbatches)
    if more and not pad:
        below = length - length % num_microbatches
        sizes = [str(size) for size in (below, below + num_microbatches) if size]
        fewer = max(count for count in range(1, num_microbatches) if length % count == 0)
        raise ShardwiseError(
            f"a batch of {length} cannot be cut into {num_microbatches} equal microbatches",
            remedy=f"a batch of {' or '.join(sizes)}, or microbatches={fewer}, or pad=True",
        )
    if length == 0:
        raise ShardwiseError("the batch has no row", remedy=f"a batch of {num_microbatches}")
    ends = [number * size + min(number, more) for number in range(num_microbatches + 1)]
    return [
        _rows(batch, length, first, end) if end > first else Padding(_rows(batch, length, length - 1, length))
        for first, end in pairwise(ends)
    ]


def padded(batch: Batch, length: int) -> Batch:
    """The batch with its last row repeated up to a length."""
    before = length_of(batch)
    if before == length:
        return batch

    def fill(entry: Any) -> Any:
        if not (isinstance(entry, Tensor) and entry.dim() and entry.shape[0] == before):
            return entry
        return torch.cat((entry, entry[-1:].expand(length - before, *entry.shape[1:])))

    return {name: fill(entry) for name, entry in batch.items()}


def _rows(batch: Batch, length: int, first: int, end: int) -> Batch:
    return {
        name: entry[first:end] if isinstance(entry, Tensor) and entry.dim() and entry.shape[0] == length else entry
        for name, entry in batch.items()
    }


def length_of(batch: Batch) -> int:
    """How many rows a batch has."""
    length = next((entry.shape[0] for entry in batch.values() if isinstance(entry, Tensor) and entry.dim()), None)
    if length is None:
        raise ShardwiseError(
            "the batch holds no tensor, so it has no length to cut into microbatches",
            remedy='a dictionary like {"input_ids": ids, "labels": labels}',
        )
    return length


def shapes_of(batch: Batch) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """All that the shapes of values depend on."""
    return tuple((name, entry.shape, entry.dtype) for name, entry in batch.items() if isinstance(entry, Tensor))


def home_of(batch: Batch) -> torch.device:
    """Where a batch's tensors are."""
    return next((entry.device for entry in batch.values() if isinstance(entry, Tensor)), torch.device("cpu"))
