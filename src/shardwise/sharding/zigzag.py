"""Zigzag sharding: two pieces of a sequence for each rank, early and late, so that causal attention is equal work.

piece    0 1 2 3 4 5 6 7            keys 0 1 2 3 4 5 6 7
rank     0 1 2 3 3 2 1 0     queries 0   0 . . . . . . .      a number: the rank of the queries computes this
                                     1   1 1 . . . . . .      a dot: nothing is seen there, and nothing computed
                                     2   2 2 2 . . . . .
                                     3   3 3 3 3 . . . .      rank 0 has rows 0 and 7: 1 + 8 cells
                                     4   3 3 3 3 3 . . .      rank 1 has rows 1 and 6: 2 + 7 cells
                                     5   2 2 2 2 2 2 . .      ...
                                     6   1 1 1 1 1 1 1 .
                                     7   0 0 0 0 0 0 0 0
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def pieces_of(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the two pieces of a rank."""
    return rank, 2 * num_ranks - 1 - rank


def zigzag_shard(whole: Tensor, dim: int, rank: int, num_ranks: int) -> Tensor:
    """Return a rank's two pieces of a tensor. The size of `dim` must divide by twice the number of ranks."""
    length = whole.shape[dim] // (2 * num_ranks)
    parts = [whole.narrow(dim, piece * length, length) for piece in pieces_of(rank, num_ranks)]
    return torch.cat(parts, dim)


def zigzag_unshard(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Reassemble the whole tensor from the parts of all ranks."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)
