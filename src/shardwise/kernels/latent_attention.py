"""Attention over latent vectors in blocks: DeepSeek's multi-head latent attention, whose cache all heads share.

    a row of the cache     latent vector (rank) │ rotated key
    a query of a head      absorbed part (rank) │ rotated part

All heads share one key, the whole row, and one value, its latent vector. So a row is read once for many heads, and no
keys or values are expanded from it (DeepSeek-V2, section 2.1.2: the up-projections of keys and values are absorbed into
the queries and the outputs). Tables, lengths and windows are those of `paged_attention.py`.
"""

import torch
from torch import Tensor

from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.paged_attention import attend_last


def latent_decode(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    rank: int,
    scale: float,
    window: int | None = None,
    kernels: bool = True,
) -> Tensor:
    """Attend with one query per sequence, [sequences, heads, rank + dim], over rows, [blocks, block size, rank + dim].

    Returns weighted sums of latent vectors, [sequences, heads, rank]. A length of 0 is padding, and gives zeros.
    """
    if kernels and takes_kernel("latent_decode", query, cache, lacks=lambda: _lacks(query, cache)):
        from shardwise.kernels.latent_attention_triton import decode

        return decode(query, cache, tables, lengths, rank, scale, window)
    made = query.new_zeros(*query.shape[:2], rank)
    for sequence, length in enumerate(lengths.tolist()):
        if length:
            rows = rows_in_order(cache, tables[sequence], length)[None]
            seen = attend_last(query[sequence, None], rows, rows[..., :rank], scale=scale, window=window)
            made[sequence] = seen[0]
    return made


def rows_in_order(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return the rows of one sequence, [tokens, rank + dim]."""
    return cache[table[: -(-length // cache.shape[1])]].flatten(0, 1)[:length]


def _lacks(query: Tensor, cache: Tensor) -> str | None:
    if cache.stride(2) != 1 or query.stride(2) != 1 or cache.dtype != query.dtype:
        return f"{cache.dtype} in a cache that lies so"
    row_bytes = cache.shape[2] * cache.element_size()
    # A program's queries and rows must fit a multiprocessor's shared memory.
    return f"rows of {row_bytes} bytes (1280 at most)" if row_bytes > 1280 else None


def absorb(query: Tensor, weight: Tensor) -> Tensor:
    """Multiply [tokens, heads, some] with a weight per head, [heads, some, others]: queries to the latent space, or
    sums of latent vectors to the heads' outputs."""
    return torch.bmm(query.transpose(0, 1), weight).transpose(0, 1)
