"""Which keys a query sees: by the rule of a layer, and by the documents and padding of a batch.

Ranks never hold the mask of a whole sequence. The positions of two pieces of it tell whether one sees all of the other,
nothing, or a part. A dense mask is made only for two pieces of which one sees a part of the other.
"""

from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional


class BlockType(Enum):
    """What the queries of one piece see of the keys of another."""

    EMPTY = "."
    FULL = "#"
    #: The keys up to the query's own. The pieces of queries and keys are the same.
    CAUSAL = "\\"
    #: Given by a dense mask.
    PARTIAL = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """The rule of a layer. A key is within the `window` if it is less than this many tokens away.

    The rule also says whether the documents and padding of the batch matter. A layer that calls torch's attention with
    `is_causal` and no mask sees across documents, and does so here too.
    """

    causal: bool
    window: int | None = None
    documents: bool = False
    padding: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class BlockMask:
    """What the queries of each piece (rows) see of the keys of each. Compared by identity; `_by_position` caches it."""

    rows: tuple[tuple[BlockType, ...], ...]

    def __str__(self) -> str:
        return "\n".join("".join(kind.value for kind in row) for row in self.rows)


@dataclass(slots=True, kw_only=True, eq=False)
class Tokens:
    """The facts about the whole sequences of a batch that every rank knows.

    `length` counts the tokens of a sequence with padding to a multiple of the pieces, `num_real` without. `documents`
    are numbered in order, and `hidden` marks keys that no query sees: both [batch, length], on the batch's device.
    """

    num_ranks: int
    length: int
    num_real: int
    documents: Tensor | None = None
    hidden: Tensor | None = None
    _block_masks: dict[Mask, BlockMask] = field(default_factory=dict)

    @property
    def piece_length(self) -> int:
        return self.length // (2 * self.num_ranks)

    def block_mask(self, mask: Mask) -> BlockMask:
        """Return what each piece sees of each other piece, computed once for a rule."""
        if mask not in self._block_masks:
            num_pieces, num_real = 2 * self.num_ranks, self.length if mask.causal else self.num_real
            block_mask = _by_position(num_pieces, self.piece_length, num_real, mask.causal, mask.window)
            if mask.documents and self.documents is not None:
                block_mask = _narrowed(block_mask, *_by_documents(self.documents, num_pieces))
            if mask.padding and self.hidden is not None:
                block_mask = _narrowed(block_mask, *_by_padding(self.hidden, num_pieces))
            self._block_masks[mask] = block_mask
        return self._block_masks[mask]

    def dense_mask(self, mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the mask [batch or 1, 1, queries, keys], True where seen, for positions in the whole sequence."""
        distance = queries[:, None] - keys
        far = self.length if mask.window is None else mask.window
        seen = (distance < far) & (distance >= 0 if mask.causal else distance > -far)
        if not mask.causal and self.num_real < self.length:
            # Under a causal mask no real query sees the padding, which is at the end.
            seen = seen & (keys < self.num_real)
        seen = seen[None]
        if mask.documents and self.documents is not None:
            seen = seen & (self.documents[:, queries, None] == self.documents[:, None, keys])
        if mask.padding and self.hidden is not None:
            seen = seen & ~self.hidden[:, None, keys]
        return seen[:, None]

    def may_see_nothing(self, mask: Mask) -> bool:
        """Whether some queries may see no key at all. Without padding each sees itself."""
        return mask.padding and self.hidden is not None


@lru_cache(maxsize=256)
def _by_position(num_pieces: int, length: int, num_real: int, causal: bool, window: int | None) -> BlockMask:
    top = (num_pieces * length if window is None else window) - 1
    bottom = 0 if causal else -top

    def kind(query: int, key: int) -> BlockType:
        nearest, furthest = (query - key - 1) * length + 1, (query - key + 1) * length - 1
        if furthest < bottom or nearest > top or key * length >= num_real:
            return BlockType.EMPTY
        if bottom <= nearest and furthest <= top and (key + 1) * length <= num_real:
            return BlockType.FULL
        return BlockType.CAUSAL if causal and query == key and top >= length - 1 else BlockType.PARTIAL

    return BlockMask(tuple(tuple(kind(query, key) for key in range(num_pieces)) for query in range(num_pieces)))


def _by_documents(documents: Tensor, num_pieces: int) -> tuple[list[list[bool]], list[list[bool]]]:
    """For pairs of pieces: whether they share a document in any sequence, and whether both lie in one in all."""
    pieces = documents.view(len(documents), num_pieces, -1)
    first, last = pieces[..., 0], pieces[..., -1]  # Numbers never fall along a sequence.
    meet = (first[:, :, None] <= last[:, None, :]) & (first[:, None, :] <= last[:, :, None])
    alike = (first[:, :, None] == last[:, None, :]) & (first[:, None, :] == last[:, :, None])
    return meet.any(0).tolist(), alike.all(0).tolist()


def _by_padding(hidden: Tensor, num_pieces: int) -> tuple[list[list[bool]], list[list[bool]]]:
    """For pairs of pieces: whether any key is visible in any sequence, and whether all keys are in all."""
    pieces = hidden.view(len(hidden), num_pieces, -1)
    some, every = (~pieces).any(2).any(0).tolist(), (~pieces).all(2).all(0).tolist()
    return [some] * num_pieces, [every] * num_pieces


def _narrowed(block_mask: BlockMask, some: list[list[bool]], every: list[list[bool]]) -> BlockMask:
    def narrower(query: int, key: int) -> BlockType:
        if not some[query][key]:
            return BlockType.EMPTY
        before = block_mask.rows[query][key]
        return before if every[query][key] or before is BlockType.EMPTY else BlockType.PARTIAL

    places = range(len(block_mask.rows))
    return BlockMask(tuple(tuple(narrower(query, key) for key in places) for query in places))


def number_documents(documents: Tensor) -> Tensor:
    """Number runs of equal ids from 0 in each sequence. An id that recurs later is another document."""
    return functional.pad(documents.diff() != 0, (1, 0)).cumsum(1)


def positions_in(documents: Tensor) -> Tensor:
    """Return positions that begin at 0 in each of the numbered documents."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = functional.pad(documents.diff() != 0, (1, 0), value=True)
    return index - torch.where(starts, index, 0).cummax(1).values
