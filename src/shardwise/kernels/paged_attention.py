"""Attention over keys and values that lie in blocks: of many sequences at once, each with its own table of blocks.

    tables    one row a sequence: its blocks, in the order of its tokens
    lengths   how many tokens of it are in the blocks, those of this step included
    starts    where its queries begin among all queries, and behind the last their number

The queries of a sequence are the last of its tokens. A window is how many tokens a query sees, itself included.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


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
    """Queries, [queries, heads, dim], that are the last of the keys, [heads, keys, dim]; fewer heads are shared."""
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
    """The first token that any of the last queries sees."""
    return 0 if window is None else max(0, length - num_queries - window + 1)


def _in_a_row(cache: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
    """[heads, tokens, dim] from blocks."""
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
