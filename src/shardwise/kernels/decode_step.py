"""Attention of a decode step, fused: write each sequence's newest key and value into its block, and attend to all.

query, key, value of one token per sequence, as one product gives them
    key, value ── norm, rotated (`cache_write.py`) ── the sequence's block
    query ─────── norm, rotated ── over all of the sequence's blocks (`paged_attention.py`) ── out
"""

import torch
from torch import Tensor

from shardwise.kernels.cache_write import Turn, lacks_turn, write_cache
from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.paged_attention import lacks_blocks, paged_decode


def decode_step(
    given: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    turn: Turn,
    *,
    scale: float,
    window: int | None = None,
    counters: Tensor | None = None,
    kernels: bool = True,
) -> Tensor:
    """Return the attention of `given`, [sequences, (heads + 2 KV heads) x dim], as [sequences, heads, dim].

    Lengths count the newest token; a row of length 0 is padding: it writes nothing, and gives zeros. Lengths and tables
    are read while the kernel that makes `given` may still run, so that kernel must not write them. `counters` are as in
    `paged_decode`.
    """
    floats = turn.q_norm, turn.k_norm
    if kernels and takes_kernel(
        "decode_step", given, keys, values, *floats,
        lacks=lambda: lacks_blocks(keys, values) or lacks_turn(given, keys, turn),
    ):  # fmt: skip
        from shardwise.kernels.paged_decode_triton import decode

        return decode(given, keys, values, tables, lengths, scale, window, counters, turn)
    size, positions = keys.shape[2], (lengths.long() - 1).clamp(min=0)
    places = tables.gather(1, (positions // size)[:, None])[:, 0] * size + positions % size
    query = write_cache(
        given, keys, values, positions, torch.where(lengths > 0, places, -1), turn, kernels=kernels
    )  # fmt: skip
    return paged_decode(
        query, keys, values, tables, lengths, scale=scale, window=window, counters=counters, kernels=kernels
    )
