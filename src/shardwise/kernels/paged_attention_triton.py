"""The kernel of `paged_prefill`: a program has a tile of queries of one head, and reads the blocks they attend to.

Keys and values are loaded directly from the blocks: the table says where each row of a tile is. If there are few tiles,
as for a short piece after a long prefix, several programs read parts of each context, and the last one combines them.
"""

# mypy: ignore-errors
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.device_functions import dot, precision_of
from shardwise.kernels.launch import launch, num_processors
from shardwise.kernels.paged_functions import ANY_PLACE, ANY_SIZE, LOG2_E, leave, rows_of_tokens, softmax_step

#: Keys of a tile, and stages: for one tile in flight, and for two if queries are few (`paged_decode_triton.py`).
PREFILL_KEYS, PREFILL_STAGES, SHORT_STAGES = 64, 3, 5
#: The wanted number of programs per multiprocessor, the fewest tokens of a part, and the most parts.
PREFILL_PROGRAMS, FEWEST_TOKENS, MOST_PARTS = 2, 256, 16


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
        rows = rows_of_tokens(tables, table_row, token, is_token, block_stride, token_stride, BLOCK_SIZE)
        offsets = rows[:, None] + dim[None, :]
        mask = is_token[:, None] & is_dim[None, :]
        key = tl.load(keys + offsets, mask=mask, other=0.0)
        logits = dot(q, tl.trans(key), PRECISION) * scale
        if IS_MASKED:
            is_seen = token[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (position[:, None] - token[None, :] < window)
            logits = tl.where(is_seen, logits, -float("inf"))
        shares, kept, highest, total = softmax_step(logits, highest, total)
        value = tl.load(values + offsets, mask=mask, other=0.0)
        seen = seen * kept[:, None] + dot(shares.to(value.dtype), value, PRECISION)
    return highest, total, seen


@triton.jit(do_not_specialize=ANY_SIZE, do_not_specialize_on_alignment=ANY_PLACE)
def _prefill(
    query, keys, values, tables, lengths, starts, tiles, out, sums, logs, counters, scale, window,
    q_row, q_head, block_stride, head_stride, token_stride, table_stride, num_heads,
    SHARING: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, FEWEST: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
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
    # Before this key, every query of the tile attends to every key.
    clear = (before + first_row + 1) // KEYS * KEYS
    if HAS_WINDOW:
        begin = tl.maximum(before + first_row - window + 1, 0) // KEYS * KEYS
        clear = begin
    end = tl.minimum(before + first_row + QUERIES, length)
    num_parts, part = 1, tl.program_id(2)
    if IS_SPLIT:
        each = tl.cdiv(tl.maximum(tl.cdiv(end - begin, tl.num_programs(2)), FEWEST), KEYS) * KEYS
        num_parts = tl.cdiv(end - begin, each)
        if part >= num_parts:
            return
        begin += part * each
        end = tl.minimum(begin + each, end)
        clear = tl.minimum(tl.maximum(clear, begin), end)
    highest, total, seen = _prefill_tiles(
        q, keys, values, tables, table_row, position, begin, clear, length, highest, total, seen, scale, window,
        block_stride, token_stride, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, HAS_WINDOW, False, PRECISION,
    )  # fmt: skip
    highest, total, seen = _prefill_tiles(
        q, keys, values, tables, table_row, position, clear, end, length, highest, total, seen, scale, window,
        block_stride, token_stride, HEAD_DIM, DIM, BLOCK_SIZE, KEYS, HAS_WINDOW, True, PRECISION,
    )  # fmt: skip
    if IS_SPLIT:
        leave(
            highest, total, seen, out, sums, logs, counters + tl.program_id(1) * num_heads + head,
            (start + first_row).to(tl.int64) * num_heads + head, num_heads, num_queries - first_row,
            part, tl.num_programs(2), num_parts, dim, dim < HEAD_DIM, QUERIES, QUERIES, HEAD_DIM, DIM,
        )  # fmt: skip
    else:
        seen = seen / tl.where(total == 0.0, 1.0, total)[:, None]
        there = out + (here * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(there, seen.to(out.dtype.element_ty), mask=mask)


def prefill(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, starts: Tensor, tiles: Tensor,
    out: Tensor, scale: float, window: int | None, num_queries: int,
) -> None:  # fmt: skip
    """See `paged_prefill`."""
    num_heads, head_dim = query.shape[1:]
    dim = max(16, triton.next_power_of_2(head_dim))
    is_wide = dim > 128 or query.dtype == torch.float32
    parts = count_prefill_parts(num_heads * len(tiles), tables.shape[1] * keys.shape[2], num_processors(query.device))
    sums = logs = counters = out
    if parts > 1:
        rows = query.shape[0] * num_heads * parts
        sums, logs = (query.new_empty(size, dtype=torch.float32) for size in (rows * head_dim, rows))
        counters = query.new_zeros(num_heads * len(tiles), dtype=torch.int32)
    launch(
        _prefill, (num_heads, len(tiles), parts),
        query, keys, values, tables, lengths, starts, tiles, out, sums, logs, counters, scale * LOG2_E, window or 0,
        query.stride(0), query.stride(1), *keys.stride()[:3], tables.stride(0), num_heads,
        SHARING=num_heads // keys.shape[1], HEAD_DIM=head_dim, DIM=dim, BLOCK_SIZE=keys.shape[2],
        QUERIES=num_queries, KEYS=PREFILL_KEYS if not is_wide else 32, FEWEST=FEWEST_TOKENS,
        HAS_WINDOW=window is not None, IS_SPLIT=parts > 1, PRECISION=precision_of(query.dtype),
        **({"num_warps": 8, "num_stages": PREFILL_STAGES} if num_queries > 64 else
           {"num_warps": 4, "num_stages": SHORT_STAGES}),
    )  # fmt: skip


def count_prefill_parts(programs: int, longest: int, processors: int) -> int:
    """Return into how many parts contexts are split at most, if there would be `programs` without splitting."""
    wanted = triton.next_power_of_2(triton.cdiv(PREFILL_PROGRAMS * processors, max(programs, 1)))
    return max(min(wanted, MOST_PARTS, longest // FEWEST_TOKENS), 1)
