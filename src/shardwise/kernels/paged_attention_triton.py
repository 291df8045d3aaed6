"""The programs of `paged_attention.py`.

    decode     one query a sequence. A program has all query heads of one KV head, and a part of the context: 16 rows or
               more, so that products are those of tensor cores. Parts are put together by a second, small program.
    prefill    a program has a tile of queries of one head, and reads the blocks of all that they see.

Keys and values come straight from the blocks: the rows of a tile lie wherever the table says.
"""

# mypy: ignore-errors
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.device_functions import dot, precision_of
from shardwise.kernels.launch import num_processors, overlapping

#: Keys of a tile, warps, and tiles on their way, by the program. `benchmarks/serving.py --sweep` tries others.
DECODE_KEYS, DECODE_WARPS, DECODE_TILES = 64, 4, 2
PREFILL_KEYS, PREFILL_STAGES = 64, 3
#: Programs of a decode that a processor should have, and the fewest tokens of a part where there are as many anyway.
PROGRAMS, FEWEST_TOKENS, MOST_PARTS = 6, 512, 64

_LOG2_E = 1.4426950408889634


@triton.jit
def _tile_offsets(
    tables, table_row, token, is_token, dim, block_stride, token_stride, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Where the rows of these tokens lie from the head's beginning in block 0 on."""
    block = tl.load(tables + table_row + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    row = block * block_stride + (token % BLOCK_SIZE) * token_stride
    return row[:, None] + dim[None, :]


@triton.jit
def _in_parts(length, window, fewest, num_parts, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first token that is seen, where the first part begins, and how many tokens each has."""
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin = first // KEYS * KEYS
    each = tl.maximum(tl.cdiv(length - begin, num_parts), fewest)
    return first, begin, tl.cdiv(each, KEYS) * KEYS


@triton.jit
def _decode(
    query, keys, values, tables, lengths, out, sums, logs, scale, window, fewest,
    q_row, q_head, block_stride, head_stride, token_stride, table_stride, num_heads,
    SHARING: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(lengths + sequence)
    first, begin_all, each = _in_parts(length, window, fewest, tl.num_programs(1), KEYS, HAS_WINDOW)
    begin = begin_all + part * each
    end = tl.minimum(begin + each, length)
    local = tl.arange(0, HEADS)
    head = kv_head * SHARING + local
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    is_out = (local < SHARING)[:, None] & is_dim[None, :]
    row = sequence.to(tl.int64) * num_heads + head
    if begin >= end:
        if part == 0:  # A row that nobody asked for.
            there = out + row[:, None] * HEAD_DIM + dim[None, :]
            tl.store(there, tl.zeros((HEADS, DIM), out.dtype.element_ty), mask=is_out)
        return
    q = tl.load(query + sequence.to(tl.int64) * q_row + head[:, None] * q_head + dim[None, :], mask=is_out, other=0.0)
    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    table_row = sequence.to(tl.int64) * table_stride
    highest = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    seen = tl.zeros((HEADS, DIM), tl.float32)
    for at in range(begin, end, KEYS):
        token = at + tl.arange(0, KEYS)
        is_token = token < end
        if HAS_WINDOW:
            is_token = is_token & (token >= first)
        offsets = _tile_offsets(tables, table_row, token, is_token, dim, block_stride, token_stride, BLOCK_SIZE)
        mask = is_token[:, None] & is_dim[None, :]
        key = tl.load(keys + offsets, mask=mask, other=0.0)
        logits = dot(q, tl.trans(key), PRECISION) * scale
        logits = tl.where(is_token[None, :], logits, -float("inf"))
        new = tl.maximum(highest, tl.max(logits, 1))
        # A tile before the window has nothing yet: no number minus none.
        base = tl.where(new == -float("inf"), 0.0, new)
        shares = tl.exp2(logits - base[:, None])
        kept = tl.exp2(highest - base)
        total = total * kept + tl.sum(shares, 1)
        value = tl.load(values + offsets, mask=mask, other=0.0)
        seen = seen * kept[:, None] + dot(shares.to(value.dtype), value, PRECISION)
        highest = new
    seen = seen / total[:, None]
    if begin_all + each >= length:  # There is no other part.
        there = out + row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(there, seen.to(out.dtype.element_ty), mask=is_out)
    else:
        row = row * tl.num_programs(1) + part
        tl.store(sums + row[:, None] * HEAD_DIM + dim[None, :], seen, mask=is_out)
        tl.store(logs + row, highest + tl.log2(total), mask=local < SHARING)


@triton.jit
def _put_together(
    sums, logs, lengths, out, window, fewest, num_heads, num_parts,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    length = tl.load(lengths + sequence)
    _, begin_all, each = _in_parts(length, window, fewest, num_parts, KEYS, HAS_WINDOW)
    if begin_all + each >= length:
        return
    part = tl.arange(0, PARTS)
    is_part = begin_all + part * each < length
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    row = (sequence.to(tl.int64) * num_heads + head) * num_parts + part
    log = tl.load(logs + row, mask=is_part, other=-float("inf"))
    highest = tl.max(log, 0)
    share = tl.where(is_part, tl.exp2(log - tl.where(highest == -float("inf"), 0.0, highest)), 0.0)
    seen = tl.load(sums + row[:, None] * HEAD_DIM + dim[None, :], mask=is_part[:, None] & is_dim[None, :], other=0.0)
    total = tl.sum(share, 0)
    made = tl.sum(seen * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    there = out + (sequence.to(tl.int64) * num_heads + head) * HEAD_DIM + dim
    tl.store(there, made.to(out.dtype.element_ty), mask=is_dim)


@triton.jit
def _prefill_tiles(
    q, keys, values, tables, table_row, position, begin, end, length, highest, total, seen, scale, window,
    block_stride, token_stride,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    for at in range(begin, end, KEYS):
        token = at + tl.arange(0, KEYS)
        is_token = token < length
        offsets = _tile_offsets(tables, table_row, token, is_token, dim, block_stride, token_stride, BLOCK_SIZE)
        mask = is_token[:, None] & is_dim[None, :]
        key = tl.load(keys + offsets, mask=mask, other=0.0)
        logits = dot(q, tl.trans(key), PRECISION) * scale
        if IS_MASKED:
            is_seen = token[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (position[:, None] - token[None, :] < window)
            logits = tl.where(is_seen, logits, -float("inf"))
        new = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(new == -float("inf"), 0.0, new)
        shares = tl.exp2(logits - base[:, None])
        kept = tl.exp2(highest - base)
        total = total * kept + tl.sum(shares, 1)
        value = tl.load(values + offsets, mask=mask, other=0.0)
        seen = seen * kept[:, None] + dot(shares.to(value.dtype), value, PRECISION)
        highest = new
    return highest, total, seen


@triton.jit
def _prefill(
    query, keys, values, tables, lengths, starts, tiles, out, scale, window,
    q_row, q_head, block_stride, head_stride, token_stride, table_stride, num_heads,
    SHARING: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.load(tiles + tl.program_id(1) * 2)
    first_row = tl.load(tiles + tl.program_id(1) * 2 + 1)
    start = tl.load(starts + sequence)
    num_queries = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    row = first_row + tl.arange(0, QUERIES)
    before = length - num_queries
    position = before + row
    dim = tl.arange(0, DIM)
    mask = (row < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    here = (start + row).to(tl.int64)
    q = tl.load(query + here[:, None] * q_row + head * q_head + dim[None, :], mask=mask, other=0.0)
    kv_head = head // SHARING
    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    table_row = sequence.to(tl.int64) * table_stride
    highest = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    seen = tl.zeros((QUERIES, DIM), tl.float32)
    begin = 0
    # Up to here every query of the tile sees every key.
    clear = (before + first_row + 1) // KEYS * KEYS
    if HAS_WINDOW:
        begin = tl.maximum(before + first_row - window + 1, 0) // KEYS * KEYS
        clear = begin
    highest, total, seen = _prefill_tiles(
        q, keys, values, tables, table_row, position, begin, clear, length, highest, total, seen, scale, window,
        block_stride, token_stride, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, HAS_WINDOW, False, PRECISION,
    )  # fmt: skip
    end = tl.minimum(before + first_row + QUERIES, length)
    highest, total, seen = _prefill_tiles(
        q, keys, values, tables, table_row, position, clear, end, length, highest, total, seen, scale, window,
        block_stride, token_stride, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, HAS_WINDOW, True, PRECISION,
    )  # fmt: skip
    seen = seen / tl.where(total == 0.0, 1.0, total)[:, None]
    there = out + (here * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(there, seen.to(out.dtype.element_ty), mask=mask)


def count_parts(num_sequences: int, num_kv_heads: int, longest: int, processors: int) -> tuple[int, int]:
    """In how many parts contexts are read at most, and the fewest tokens of a part. Lengths are not looked at: what a
    graph was captured with holds for all of them."""
    programs = max(num_sequences * num_kv_heads, 1)
    wanted = triton.next_power_of_2(triton.cdiv(PROGRAMS * processors, programs))
    # One long context among many short ones is still read by several.
    parts = min(max(wanted, 4), MOST_PARTS, triton.next_power_of_2(triton.cdiv(longest, DECODE_KEYS)))
    return max(parts, 1), DECODE_KEYS if wanted > 4 else FEWEST_TOKENS


def decode(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float, window: int | None
) -> Tensor:
    """See `paged_decode`."""
    num_sequences, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    out = torch.empty((num_sequences, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if not num_sequences:
        return out
    longest = tables.shape[1] * block_size
    parts, fewest = count_parts(num_sequences, num_kv_heads, longest, num_processors(query.device))
    sums = logs = out
    if parts > 1:
        sums = torch.empty((num_sequences, num_heads, parts, head_dim), dtype=torch.float32, device=query.device)
        logs = torch.empty((num_sequences, num_heads, parts), dtype=torch.float32, device=query.device)
    sharing, has_window = num_heads // num_kv_heads, window is not None
    dim = max(16, triton.next_power_of_2(head_dim))
    narrow = {"HEAD_DIM": head_dim, "DIM": dim, "KEYS": DECODE_KEYS, "HAS_WINDOW": has_window}
    _decode[(num_kv_heads, parts, num_sequences)](
        query, keys, values, tables, lengths, out, sums, logs, scale * _LOG2_E, window or 0, fewest,
        query.stride(0), query.stride(1), *keys.stride()[:3], tables.stride(0), num_heads,
        SHARING=sharing, HEADS=max(16, triton.next_power_of_2(sharing)), BLOCK_SIZE=block_size,
        PRECISION=precision_of(query.dtype), **narrow,
        num_warps=DECODE_WARPS, num_stages=_stages(DECODE_KEYS * dim * query.dtype.itemsize),
        **overlapping(query.device),
    )  # fmt: skip
    if parts > 1:
        _put_together[(num_heads, num_sequences)](
            sums,
            logs,
            lengths,
            out,
            window or 0,
            fewest,
            num_heads,
            parts,
            **narrow,
            # Of one size for few sequences, and of another for many: each is compiled once.
            PARTS=8 if parts <= 8 else MOST_PARTS,
            num_warps=2 if parts <= 8 else 4,
            **overlapping(query.device),
        )
    return out


def prefill(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, tiles: Tensor,
    out: Tensor, scale: float, window: int | None, num_queries: int,
) -> None:  # fmt: skip
    """See `paged_prefill`."""
    num_heads, head_dim = query.shape[1:]
    dim = max(16, triton.next_power_of_2(head_dim))
    is_wide = dim > 128 or query.dtype == torch.float32
    _prefill[(num_heads, tiles.shape[0])](
        query, keys, values, tables, lengths, starts, tiles, out, scale * _LOG2_E, window or 0,
        query.stride(0), query.stride(1), *keys.stride()[:3], tables.stride(0), num_heads,
        SHARING=num_heads // keys.shape[1], HEAD_DIM=head_dim, DIM=dim, BLOCK_SIZE=keys.shape[2],
        QUERIES=num_queries, KEYS=PREFILL_KEYS if not is_wide else 32, HAS_WINDOW=window is not None,
        PRECISION=precision_of(query.dtype),
        num_warps=8, num_stages=PREFILL_STAGES,
    )  # fmt: skip


def _stages(tile_bytes: int) -> int:
    """For so many tiles on their way as three programs have room for in a processor's shared memory. Each takes two
    stages: its blocks' numbers are read before its keys and values."""
    return 1 + 2 * min(DECODE_TILES, 72 * 1024 // (2 * tile_bytes))
