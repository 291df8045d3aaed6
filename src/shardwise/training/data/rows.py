"""Rows for a model: contiguous tokens of a file, their labels, and the document of each token.

tokens      a a a a b b b b b b c c      three documents, rows of 4
row 0       a a a a                      labels  a a a -       the last of a document has no next token
row 1       b b b b                      labels  b b b b       the last label is the first token of row 2
row 2       b b c c                      labels  b - c -       positions restart at c, which does not attend to b
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.training.data.images import ImageRows, RandomImages
from shardwise.training.data.order import Order
from shardwise.training.data.tokens import Tokens

#: The label of a position without a target.
IGNORED = -100
#: The number of batches to prefetch.
_NUM_AHEAD = 3

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The complete rows of a part of a token file."""

    source: Tokens
    sequence: int
    first_row: int
    num_rows: int
    masks: bool

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Return rows as tensors: `input_ids`, `labels` and, if masked, `documents`, each [rows, sequence]."""
        tokens, ends = self.source.tokens, self.source.ends
        starts = (rows + self.first_row) * self.sequence
        places = starts[:, None] + np.arange(self.sequence)
        ids = tokens[places].astype(np.int64)
        next_places = np.minimum(places + 1, len(tokens) - 1)
        following = tokens[next_places].astype(np.int64)
        for found, where in ((ids, places), (following, next_places)):
            # A large file is not verified before training, so damage is found here.
            if found.max() >= self.source.vocabulary:
                raise self.source.beyond(int(where[np.unravel_index(found.argmax(), found.shape)]))
        documents = np.searchsorted(ends, places, side="right")
        is_last = ends[np.minimum(documents, len(ends) - 1)] == places + 1
        labels = np.where(is_last, IGNORED, following)
        made = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        return {**made, "documents": torch.from_numpy(documents)} if self.masks else made


AnyRows = Rows | ImageRows


def training_and_held_out(
    source: Tokens | RandomImages, *, sequence: int, held_out: float, masks: bool, batch: int
) -> tuple[AnyRows, AnyRows]:
    """Return the rows to train on, and those for evaluation: the last ones, at least a batch if any are held out."""
    if isinstance(source, RandomImages):
        return source.parts(held_out=held_out, batch=batch)
    count = source.num_tokens // sequence
    kept = 0 if held_out == 0 else max(batch, round(count * held_out))
    if count - kept < batch:
        raise ShardwiseError(
            f"{source.path} has {source.num_tokens} tokens, which are {count} rows of {sequence}: {kept} to evaluate"
            f" with and not {batch} to train on",
            remedy=f"at least {sequence * (batch + max(batch, kept))} tokens, or a smaller batch or data.sequence",
        )
    rows = partial(Rows, source=source, sequence=sequence, masks=masks)
    return rows(first_row=0, num_rows=count - kept), rows(first_row=count - kept, num_rows=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The batch of each step, from the seed and the step alone."""

    rows: AnyRows
    size: int
    seed: int

    def at(self, step: int) -> Batch:
        order = Order(size=self.rows.num_rows, seed=self.seed)
        return self.rows.batch(order.samples(step * self.size, self.size))


class Prefetcher:
    """The batches of the steps from `first` to before `last`, in order, prefetched by a thread. An error in reading is
    raised by `next`. With `pins` they are in pinned memory, from which a GPU copies while it computes."""

    def __init__(self, read: Callable[[int], Batch], first: int, last: int, *, pins: bool = False) -> None:
        self._read, self._steps, self._pins = read, iter(range(first, last)), pins
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-data")
        self._ahead: deque[Future[Batch]] = deque()
        for _ in range(_NUM_AHEAD):
            self._read_one()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def next(self) -> Batch:
        found = self._ahead.popleft().result()
        self._read_one()
        return found

    def _read_one(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._ahead.append(self._thread.submit(self._read_batch, step))

    def _read_batch(self, step: int) -> Batch:
        batch = self._read(step)
        return {name: each.pin_memory() for name, each in batch.items()} if self._pins else batch
