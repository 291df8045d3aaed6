"""Cut a batch into microbatches; its length and device."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.stages.rows import RowRule, Seen, changed, nodes, take_rows, tensors_in
from shardwise.stages.stage import Batch


class Microbatch(dict):  # type: ignore[type-arg]
    """Some rows of a batch, and their number."""

    num_rows: int = 0


class Padding(Microbatch):
    """A microbatch that repeats a row because there are too few. It runs like any other but counts for nothing."""


def cut_batch(batch: Batch, num_microbatches: int, *, pad: bool = False, seen: Seen | None = None) -> list[Batch]:
    """Return the microbatches: entries with one row for each of the batch's are cut, all others go to each.

    The entries to cut are found (`rows.py`), or given as `seen`. With `pad` any length is allowed: some microbatches
    have one row more than others, and if there are fewer rows than microbatches the last ones are `Padding`.
    """
    seen = RowRule().look(batch) if seen is None else seen
    length = seen.length
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
        _rows(batch, seen, first, end) if end > first else _rows(batch, seen, length - 1, length, Padding)
        for first, end in pairwise(ends)
    ]


def padded(batch: Batch, seen: Seen, length: int) -> Batch:
    """Return the batch with its last row repeated up to a length."""
    more = length - seen.length

    def fill(path: str, entry: Any) -> Any:
        if path not in seen.paths:
            return None
        if isinstance(entry, Tensor):
            return torch.cat((entry, entry[-1:].expand(more, *entry.shape[1:])))
        if isinstance(entry, (list, tuple)):
            return type(entry)((*entry, *([entry[-1]] * more)))
        return np.concatenate((entry, entry[-1:].repeat(more, 0)))

    return changed(batch, fill) if more else batch


def picked(batch: Batch, seen: Seen, places: Sequence[int]) -> Batch:
    """Return these rows of a batch, in this order, without marks."""

    def take(path: str, value: Any) -> Any:
        if path not in seen.paths:
            return None
        if isinstance(value, Tensor):
            return value[torch.tensor(places, device=value.device)]
        return type(value)(value[each] for each in places) if isinstance(value, (list, tuple)) else value[list(places)]

    return changed(take_rows(batch, seen, 0, seen.length), take)  # type: ignore[no-any-return]


def _rows(batch: Batch, seen: Seen, first: int, end: int, kind: type[Microbatch] = Microbatch) -> Microbatch:
    made = kind(take_rows(batch, seen, first, end))
    made.num_rows = end - first
    return made


def length_of(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return batch.num_rows if isinstance(batch, Microbatch) else RowRule().length(batch)


def shapes_of(batch: Batch) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Return all shapes and dtypes of a batch, on which the shapes of values depend."""
    return tuple((path, each.shape, each.dtype) for path, each in nodes(batch) if isinstance(each, Tensor))


def home_of(batch: Batch) -> torch.device:
    """Return the device of a batch's tensors."""
    return next((each.device for each in tensors_in(batch)), torch.device("cpu"))
