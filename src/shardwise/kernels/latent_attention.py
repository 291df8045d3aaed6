"""Attention over short vectors that lie in blocks: what DeepSeek keeps of a token, the same for all heads.

    a row of the cache     short vector (rank) │ rotated key
    a query of a head      what it asks of short vectors (rank) │ rotated part

All heads share one key, the whole row, and one value, its short vector: so a row is read once for many heads, and
nothing is made of it (DeepSeek-V2, section 2.1.2: the matrices that would make keys and values of it are put into the
queries and behind the sums). Tables, lengths and windows are those of `paged_attention.py`.
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
    """The only query of each sequence, [sequences, heads, rank + dim], over rows, [blocks, block size, rank + dim].

    Sums of short vectors, [sequences, heads, rank]. A length of 0 is a row that nobody asked for, and gives zeros.
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
    """The rows of one sequence, [tokens, rank + dim]."""
    return cache[table[: -(-length // cache.shape[1])]].flatten(0, 1)[:length]


def _lacks(query: Tensor, cache: Tensor) -> str | None:
    if cache.stride(2) != 1 or query.stride(2) != 1 or cache.dtype != query.dtype:
        return f"{cache.dtype} in a cache that lies so"
    row_bytes = cache.shape[2] * cache.element_size()
    # What a program has of queries and rows is as much as a processor's shared memory holds.
    return f"rows of {row_bytes} bytes (1280 at most)" if row_bytes > 1280 else None


def absorb(query: Tensor, weight: Tensor) -> Tensor:
    """[tokens, heads, some] by a weight of each head, [heads, some, others]: queries to what they ask of short vectors,
    and sums of short vectors to what heads see."""
    return torch.bmm(query.transpose(0, 1), weight).transpose(0, 1)
