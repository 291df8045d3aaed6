"""The kernel of `paged_decode` and of `decode_step`: one query per sequence.

A program has all query heads of one KV head and a part of the context: at least 16 rows, so that products use tensor
cores. The part that ends last combines all parts. In a decode step the program derives its queries from the layer's
product, and the part with the newest token derives and writes that token's key and value.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM102

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.device_functions import dot, precision_of, prefetch
from shardwise.kernels.launch import launch, num_processors, overlapping
from shardwise.kernels.paged_functions import (
    ANY_PLACE,
    ANY_SIZE,
    LOG2_E,
    count_parts,
    in_parts,
    leave,
    rows_of_tokens,
    softmax_step,
)

#: Keys of a tile, warps, and tiles in flight. `benchmarks/serving.py --cases sweep` tries others.
DECODE_KEYS, DECODE_WARPS, DECODE_TILES = 64, 4, 2


@triton.jit
def _made_heads(
    raw, other, weight, other_weight, cosine, sine, epsilon,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ANGLES: tl.constexpr,
):  # fmt: skip
    """Return heads, [heads, dim], from elements and their partners: normed, rotated, rounded as `write_cache` does."""
    made, paired = raw.to(tl.float32), other.to(tl.float32)
    if HAS_NORM:
        rstd = (1.0 / tl.sqrt(tl.sum(made * made, 1) / HEAD_DIM + epsilon))[:, None]
        made = (made * rstd * weight[None, :]).to(raw.dtype).to(tl.float32)
        paired = (paired * rstd * other_weight[None, :]).to(raw.dtype).to(tl.float32)
    if HAS_ANGLES:
        made = made * cosine[None, :] + paired * sine[None, :]
    return made.to(raw.dtype)


@triton.jit
def _fetch_tile(
    keys, values, tables, table_row, begin, end, block_stride, token_stride,
    KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Prefetch the first tile of a part while the previous kernel ends."""
    token = begin + tl.arange(0, KEYS)
    rows = rows_of_tokens(tables, table_row, token, token < end, block_stride, token_stride, BLOCK_SIZE)
    lines = rows[:, None] + tl.arange(0, AHEAD)[None, :] * (HEAD_DIM // AHEAD)
    prefetch(keys + lines)
    prefetch(values + lines)


@triton.jit
def _turn_of(
    q_norm, k_norm, cosine, sine, position, dim, is_dim,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ANGLES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return for each element of a head its source and its rotary partner, the angles of a position, and the norm
    weights of queries and of keys for each element and its partner."""
    HALF: tl.constexpr = HEAD_DIM // 2
    is_second = dim >= HALF
    pair = tl.where(is_second, dim - HALF, dim)
    own, partner = dim, tl.where(is_second, pair, pair + HALF)
    if INTERLEAVED and HAS_ANGLES:
        own = 2 * pair + is_second.to(tl.int32)
        partner = 2 * pair + 1 - is_second.to(tl.int32)
    c = tl.zeros((DIM,), tl.float32)
    s, q_own, q_other, k_own, k_other = c, c, c, c, c
    if HAS_ANGLES:
        c = tl.load(cosine + position * HALF + pair, mask=is_dim, other=0.0)
        s = tl.load(sine + position * HALF + pair, mask=is_dim, other=0.0)
        s = tl.where(is_second, s, -s)
    if HAS_NORM:
        q_own = tl.load(q_norm + own, mask=is_dim, other=0.0).to(tl.float32)
        k_own = tl.load(k_norm + own, mask=is_dim, other=0.0).to(tl.float32)
        q_other = tl.load(q_norm + partner, mask=is_dim, other=0.0).to(tl.float32)
        k_other = tl.load(k_norm + partner, mask=is_dim, other=0.0).to(tl.float32)
    return own, partner, c, s, q_own, q_other, k_own, k_other


@triton.jit
def _paired(rows, own, partner, mask):
    """Load elements of heads, and each one's partner."""
    return tl.load(rows + own[None, :], mask=mask, other=0.0), tl.load(rows + partner[None, :], mask=mask, other=0.0)


@triton.jit
def _seen_in_blocks(
    q, keys, values, tables, table_row, begin, end, first, dim, is_dim, scale, block_stride, token_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to some tokens: return the maximum logit, the sum of exponentials, and the weighted sum of values."""
    highest = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    seen = tl.zeros((HEADS, DIM), tl.float32)
    for at in range(begin, end, KEYS):
        token = at + tl.arange(0, KEYS)
        is_token = token < end
        if HAS_WINDOW:
            is_token = is_token & (token >= first)
        rows = rows_of_tokens(tables, table_row, token, is_token, block_stride, token_stride, BLOCK_SIZE)
        offsets = rows[:, None] + dim[None, :]
        mask = is_token[:, None] & is_dim[None, :]
        key = tl.load(keys + offsets, mask=mask, other=0.0)
        logits = dot(q, tl.trans(key), PRECISION) * scale
        logits = tl.where(is_token[None, :], logits, -float("inf"))
        shares, kept, highest, total = softmax_step(logits, highest, total)
        value = tl.load(values + offsets, mask=mask, other=0.0)
        seen = seen * kept[:, None] + dot(shares.to(value.dtype), value, PRECISION)
    return highest, total, seen


@triton.jit
def _put(keys, key, values, value, mask):
    tl.store(keys, key, mask=mask)
    tl.store(values, value, mask=mask)


@triton.jit
def _see_one(q, key, value, highest, total, seen, scale):
    """Attend to one more token, key and value [1, dim]."""
    logit = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
    new = tl.maximum(highest, logit)
    share, kept = tl.exp2(logit - new), tl.exp2(highest - new)
    seen = seen * kept[:, None] + share.to(value.dtype).to(tl.float32)[:, None] * value.to(tl.float32)
    return new, total * kept + share, seen


@triton.jit(do_not_specialize=ANY_SIZE, do_not_specialize_on_alignment=ANY_PLACE)
def _decode(
    query, keys, values, tables, lengths, out, sums, logs, counters, q_norm, k_norm, cosine, sine, epsilon,
    scale, window, fewest, q_row, q_head, block_stride, head_stride, token_stride, table_stride, num_heads,
    SHARING: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    IS_STEP: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ANGLES: tl.constexpr, INTERLEAVED: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        if not IS_STEP:
            tl.extra.cuda.gdc_wait()
    kv_head, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    # In a decode step, lengths, tables and older tokens are not written by the previous kernel: read them right away.
    length = tl.load(lengths + sequence)
    first, begin_all, each = in_parts(length, window, fewest, tl.num_programs(1), KEYS, HAS_WINDOW)
    begin, end = begin_all + part * each, tl.minimum(begin_all + (part + 1) * each, length)
    dim, heads_before = tl.arange(0, DIM), kv_head.to(tl.int64) * head_stride
    is_dim = dim < HEAD_DIM
    keys, values = keys + heads_before, values + heads_before
    table_row = sequence * table_stride
    if AHEAD:
        _fetch_tile(
            keys, values, tables, table_row, begin, end, block_stride, token_stride, KEYS, BLOCK_SIZE, HEAD_DIM, AHEAD
        )  # fmt: skip
    # What no kernel of the step writes is read before the wait; what the previous kernel wrote, directly after it.
    if IS_STEP:
        position = tl.maximum(length - 1, 0).to(tl.int64)
        own, partner, c, s, q_own, q_other, k_own, k_other = _turn_of(
            q_norm, k_norm, cosine, sine, position, dim, is_dim, HEAD_DIM, DIM, HAS_NORM, HAS_ANGLES, INTERLEAVED
        )  # fmt: skip
        newest = tl.load(tables + table_row + position // BLOCK_SIZE).to(tl.int64)
        if OVERLAPS:
            tl.extra.cuda.gdc_wait()
    local = tl.arange(0, HEADS)[:, None]
    is_out = (local < SHARING) & is_dim[None, :]
    first_row = sequence * num_heads + kv_head * SHARING
    if begin >= end:
        if part == 0:  # A padding row.
            nothing = tl.zeros((HEADS, DIM), out.dtype.element_ty)
            tl.store(out + (first_row + local) * HEAD_DIM + dim[None, :], nothing, mask=is_out)
        return
    heads = query + sequence * q_row + (kv_head * SHARING + local) * q_head
    if IS_STEP:
        # All parts load the newest token, even those that do not need it, so that none waits for it later.
        one = tl.arange(0, 1)[:, None]
        new_row = query + sequence * q_row + (num_heads + kv_head + one) * HEAD_DIM
        q, q_partner = _paired(heads, own, partner, is_out)
        key, key_partner = _paired(new_row, own, partner, is_dim[None, :])
        value = tl.load(new_row + tl.num_programs(0) * HEAD_DIM + dim[None, :], mask=is_dim[None, :], other=0.0)
        q = _made_heads(q, q_partner, q_own, q_other, c, s, epsilon, HEAD_DIM, HAS_NORM, HAS_ANGLES)
    else:
        q = tl.load(heads + dim[None, :], mask=is_out, other=0.0)
    # The newest token of a step is not in a block yet.
    highest, total, seen = _seen_in_blocks(
        q, keys, values, tables, table_row, begin, tl.minimum(end, length - 1) if IS_STEP else end, first, dim, is_dim,
        scale, block_stride, token_stride, HEADS, DIM, BLOCK_SIZE, KEYS, HAS_WINDOW, PRECISION,
    )  # fmt: skip
    if IS_STEP:
        if end == length:
            key = _made_heads(key, key_partner, k_own, k_other, c, s, epsilon, HEAD_DIM, HAS_NORM, HAS_ANGLES)
            place = newest * block_stride + (position % BLOCK_SIZE) * token_stride + one + dim[None, :]
            _put(keys + place, key, values + place, value, is_dim[None, :])
            highest, total, seen = _see_one(q, key, value, highest, total, seen, scale)
    leave(
        highest, total, seen, out, sums, logs, counters + sequence * tl.num_programs(0) + kv_head,
        first_row, 1, SHARING, part, tl.num_programs(1), tl.cdiv(length - begin_all, each), dim, is_dim,
        HEADS, GROUP, HEAD_DIM, DIM,
    )  # fmt: skip


def decode(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float, window: int | None,
    counters: Tensor | None, turn: Any = None,
) -> Tensor:  # fmt: skip
    """See `paged_decode`; with a turn, `query` is the layer's product, see `decode_step`."""
    num_sequences = query.shape[0]
    num_kv_heads, block_size, head_dim = keys.shape[1:]
    num_heads = query[0].numel() // head_dim - (0 if turn is None else 2 * num_kv_heads) if num_sequences else 0
    out = torch.empty((num_sequences, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if not num_sequences:
        return out
    longest = tables.shape[1] * block_size
    parts, fewest = count_parts(num_sequences, num_kv_heads, longest, num_processors(query.device))
    # With one part nothing is stored or counted, but arguments have the same types, so that one compiled kernel serves.
    rows = num_sequences * num_heads * parts if parts > 1 else 0
    sums, logs = (torch.empty(count, dtype=torch.float32, device=query.device) for count in (rows * head_dim, rows))
    if parts == 1:
        counters = lengths
    elif counters is None:
        counters = torch.zeros(num_sequences * num_kv_heads, dtype=torch.int32, device=query.device)
    sharing, is_step = num_heads // num_kv_heads, turn is not None
    dim = max(16, triton.next_power_of_2(head_dim))
    overlap = overlapping(query.device)
    launch(
        _decode, (num_kv_heads, parts, num_sequences),
        query, keys, values, tables, lengths, out, sums, logs, counters,
        *((turn.q_norm, turn.k_norm, turn.cosine, turn.sine, turn.epsilon) if is_step else (*4 * (None,), 0.0)),
        scale * LOG2_E, window or 0, fewest,
        query.stride(0), head_dim if is_step else query.stride(1), *keys.stride()[:3], tables.stride(0), num_heads,
        SHARING=sharing, HEADS=max(16, triton.next_power_of_2(sharing)), GROUP=triton.next_power_of_2(sharing),
        HEAD_DIM=head_dim, DIM=dim, BLOCK_SIZE=block_size, KEYS=DECODE_KEYS, HAS_WINDOW=window is not None,
        PRECISION=precision_of(query.dtype), IS_STEP=is_step, HAS_NORM=is_step and turn.q_norm is not None,
        HAS_ANGLES=is_step and turn.cosine is not None, INTERLEAVED=is_step and turn.interleaved,
        AHEAD=_lines(keys) if is_step and overlap["OVERLAPS"] else 0,
        num_warps=DECODE_WARPS, num_stages=_stages(DECODE_KEYS * dim * query.dtype.itemsize), **overlap,
    )  # fmt: skip
    return out


def _lines(keys: Tensor) -> int:
    """Return the 128-byte cache lines of one token's head; 0 if it is not a whole number of lines."""
    lines = keys.shape[3] * keys.element_size() // 128
    return lines if lines and lines & (lines - 1) == 0 else 0


def _stages(tile_bytes: int) -> int:
    """Return the stages for as many tiles in flight as three programs can have in a multiprocessor's shared memory.
    Each tile takes two stages: its block numbers are loaded before its keys and values."""
    return 1 + 2 * min(DECODE_TILES, 72 * 1024 // (2 * tile_bytes))
