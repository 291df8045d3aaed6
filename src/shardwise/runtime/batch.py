"""A batch: cut into microbatches, and where it is."""

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.runtime.stage import Batch


def cut_batch(batch: Batch, num_microbatches: int) -> list[Batch]:
    """Return the microbatches: tensors that have the batch's length are cut along it, all else goes to each.

    The batch's length is the first dimension of its first tensor.
    """
    length = next((entry.shape[0] for entry in batch.values() if isinstance(entry, Tensor) and entry.dim()), None)
    if length is None:
        raise ShardwiseError(
            "the batch holds no tensor, so it has no length to cut into microbatches",
            remedy='a dictionary like {"input_ids": ids, "labels": labels}',
        )
    if length % num_microbatches:
        below = length - length % num_microbatches
        sizes = [str(size) for size in (below, below + num_microbatches) if size]
        fewer = max(count for count in range(1, num_microbatches) if length % count == 0)
        raise ShardwiseError(
            f"a batch of {length} cannot be cut into {num_microbatches} equal microbatches",
            remedy=f"a batch of {' or '.join(sizes)}, or microbatches={fewer}",
        )
    size = length // num_microbatches
    return [
        {
            name: entry[number * size : (number + 1) * size]
            if isinstance(entry, Tensor) and entry.dim() and entry.shape[0] == length
            else entry
            for name, entry in batch.items()
        }
        for number in range(num_microbatches)
    ]


def shapes_of(batch: Batch) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """All that the shapes of values depend on."""
    return tuple((name, entry.shape, entry.dtype) for name, entry in batch.items() if isinstance(entry, Tensor))


def home_of(batch: Batch) -> torch.device:
    """Where a batch's tensors are."""
    return next((entry.device for entry in batch.values() if isinstance(entry, Tensor)), torch.device("cpu"))
