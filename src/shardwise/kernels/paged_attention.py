"""Attention over keys and values in blocks (paged attention): many sequences at once, each with its own block table.

    tables    one row per sequence: its blocks, in the order of its tokens
    lengths   how many of its tokens are in the blocks, those of this step included
    starts    where its queries begin among all queries; the last entry is the number of queries

The queries of a sequence are its last tokens. A window is how many tokens a query attends to, itself included.

    paged_decode     one query per sequence; a length of 0 is padding, and gives zeros
    paged_prefill    any number of queries per sequence: a piece of a prompt, after what is in the blocks already
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardwise.kernels.choose import takes_kernel

#: Queries per tile of a prefill; and the smaller tile, where no sequence has more queries than it.
TILE, SHORT_TILE = 128, 16


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    counters: Tensor | None = None,
    kernels: bool = True,
) -> Tensor:
    """Attend with one query per sequence, [sequences, heads, dim]; the rest is as in `paged_attention_plain`.

    `counters` are zeros, one int32 for each sequence and KV head, and are zeros again afterwards: a frequent caller can
    allocate them once.
    """
    if kernels and takes_kernel("paged_decode", query, keys, values, lacks=lambda: lacks_blocks(keys, values)):
        from shardwise.kernels.paged_decode_triton import decode

        return decode(query, keys, values, tables, lengths, scale, window, counters)
    told, made = lengths.tolist(), torch.zeros_like(query)
    rows = [row for row, length in enumerate(told) if length]
    if rows:
        made[rows] = paged_attention_plain(
            query[rows], keys, values, tables[rows], [told[row] for row in rows], list(range(len(rows) + 1)),
            scale=scale, window=window,
        )  # fmt: skip
    return made


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    starts: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    tile: int = TILE,
    kernels: bool = True,
) -> None:
    """Attend with queries, [queries, heads, dim], of the sequences in `tiles`; write to `out`, which is contiguous.

    `tiles` are pairs: a sequence, and the first of `tile` of its queries (`make_tiles`).
    """
    if kernels and takes_kernel("paged_prefill", query, keys, values, lacks=lambda: lacks_blocks(keys, values)):
        from shardwise.kernels.paged_attention_triton import prefill

        prefill(query, keys, values, tables, lengths, starts, tiles, out, scale, window, tile)
        return
    begins, told = starts.tolist(), lengths.tolist()
    for sequence in dict.fromkeys(tiles[:, 0].tolist()):
        begin, end = begins[sequence : sequence + 2]
        out[begin:end] = paged_attention_plain(
            query[begin:end], keys, values, tables[sequence, None], [told[sequence]], [0, end - begin],
            scale=scale, window=window,
        )  # fmt: skip


def tile_of(starts: Sequence[int], first: int = 0) -> int:
    """Return the tile size that suits the sequences from `first` on."""
    longest = max((end - begin for begin, end in pairwise(starts[first:])), default=0)
    return SHORT_TILE if longest <= SHORT_TILE else TILE


def make_tiles(starts: Sequence[int], first: int = 0, tile: int = TILE) -> list[tuple[int, int]]:
    """Return the tiles of all sequences from `first` on. Long ones come first, so that the tail is short."""
    found = [
        (sequence, begin)
        for sequence in range(first, len(starts) - 1)
        for begin in range(0, starts[sequence + 1] - starts[sequence], tile)
    ]
    return sorted(found, key=lambda each: -each[1])


def lacks_blocks(keys: Tensor, values: Tensor) -> str | None:
    """Return what the kernels do not support about such blocks, if anything."""
    if keys.shape != values.shape or keys.stride() != values.stride() or keys.stride(3) != 1:
        return f"values of {tuple(values.shape)} beside keys of {tuple(keys.shape)}"
    row_bytes = keys.shape[3] * keys.element_size()
    return f"heads of {row_bytes} bytes (512 at most)" if row_bytes > 512 else None


def paged_attention_plain(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: list[int],
    starts: list[int],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The definition: queries are [queries, heads, dim]; keys and values [blocks, heads, block size, dim]."""
    made = query.new_empty(*query.shape[:2], values.shape[-1])
    for sequence, length in enumerate(lengths):
        begin, end = starts[sequence], starts[sequence + 1]
        first = first_seen(length, end - begin, window) // keys.shape[2]
        blocks = tables[sequence, first : -(-length // keys.shape[2])]
        num_left_out = first * keys.shape[2]
        key, value = (_in_a_row(each, blocks, length - num_left_out) for each in (keys, values))
        made[begin:end] = attend_last(query[begin:end], key, value, scale=scale, window=window)
    return made


def attend_last(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None) -> Tensor:
    """Attend with queries, [queries, heads, dim], the last of the keys, [heads, keys, dim]; key heads may be shared."""
    num_queries, num_keys = query.shape[0], key.shape[1]
    num_sharing = query.shape[1] // key.shape[0]
    if num_sharing > 1:
        key, value = key.repeat_interleave(num_sharing, 0), value.repeat_interleave(num_sharing, 0)
    mask = None
    if num_queries > 1 or (window is not None and window < num_keys):
        index = torch.arange(num_keys, device=query.device)
        here = index[num_keys - num_queries :, None]
        mask = index <= here
        if window is not None:
            mask = mask & (here - index < window)
    seen = scaled_dot_product_attention(
        query.transpose(0, 1)[None], key[None], value[None], attn_mask=mask, scale=scale
    )
    return seen[0].transpose(0, 1)


def first_seen(length: int, num_queries: int, window: int | None) -> int:
    """Return the first token that any of the last queries attends to."""
    return 0 if window is None else max(0, length - num_queries - window + 1)


def _in_a_row(cache: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
    """Gather [heads, tokens, dim] from blocks."""
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
