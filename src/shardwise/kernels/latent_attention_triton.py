"""The kernel of `latent_attention.py`: a program has some heads and a part of the context; rows are keys and values.

A second kernel combines the parts, one program per head: with 64 heads of 512 numbers, the last of the first programs
would have to read up to 8 MB alone (`paged_functions.leave` is for less).
"""

# mypy: ignore-errors
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.device_functions import dot, precision_of
from shardwise.kernels.launch import launch, num_processors, overlapping
from shardwise.kernels.paged_functions import (
    ANY_PLACE,
    ANY_SIZE,
    LOG2_E,
    MOST_PARTS,
    count_parts,
    in_parts,
    rows_of_tokens,
    softmax_step,
)

#: Heads per program, which is the rows that Hopper's tensor cores take from shared memory, whatever the model has; keys
#: of a tile, warps, and stages; and how many programs fit on a multiprocessor.
HEADS, KEYS, WARPS, STAGES, PROGRAMS = 64, 32, 8, 3, 1


@triton.jit(do_not_specialize=ANY_SIZE, do_not_specialize_on_alignment=ANY_PLACE)
def _latent_decode(
    query, cache, tables, lengths, out, sums, logs, scale, window, fewest,
    q_row, q_head, block_stride, token_stride, table_stride, num_heads,
    RANK: tl.constexpr, RANK_DIM: tl.constexpr, TURNED: tl.constexpr, TURNED_DIM: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(lengths + sequence)
    first, begin_all, each = in_parts(length, window, fewest, tl.num_programs(1), KEYS, HAS_WINDOW)
    begin = begin_all + part * each
    end = tl.minimum(begin + each, length)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    is_head = (head < num_heads)[:, None]
    dim = tl.arange(0, RANK_DIM)
    turned_dim = tl.arange(0, TURNED_DIM)
    is_dim = (dim < RANK)[None, :]
    is_turned = (turned_dim < TURNED)[None, :]
    row = sequence.to(tl.int64) * num_heads + head
    if begin >= end:
        if part == 0:  # A padding row.
            there = out + row[:, None] * RANK + dim[None, :]
            tl.store(there, tl.zeros((HEADS, RANK_DIM), out.dtype.element_ty), mask=is_head & is_dim)
        return
    asked = query + sequence.to(tl.int64) * q_row + head[:, None] * q_head
    q = tl.load(asked + dim[None, :], mask=is_head & is_dim, other=0.0)
    q_turned = tl.load(asked + RANK + turned_dim[None, :], mask=is_head & is_turned, other=0.0)
    table_row = sequence.to(tl.int64) * table_stride
    highest = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    seen = tl.zeros((HEADS, RANK_DIM), tl.float32)
    for at in range(begin, end, KEYS):
        token = at + tl.arange(0, KEYS)
        is_token = token < end
        if HAS_WINDOW:
            is_token = is_token & (token >= first)
        rows = cache + rows_of_tokens(tables, table_row, token, is_token, block_stride, token_stride, BLOCK_SIZE)
        short = tl.load(rows[:, None] + dim[None, :], mask=is_token[:, None] & is_dim, other=0.0)
        turned = tl.load(rows[:, None] + RANK + turned_dim[None, :], mask=is_token[:, None] & is_turned, other=0.0)
        logits = dot(q, tl.trans(short), PRECISION) + dot(q_turned, tl.trans(turned), PRECISION)
        logits = tl.where(is_token[None, :], logits * scale, -float("inf"))
        shares, kept, highest, total = softmax_step(logits, highest, total)
        seen = seen * kept[:, None] + dot(shares.to(short.dtype), short, PRECISION)
    seen = seen / total[:, None]
    if begin_all + each >= length:  # This is the only part.
        there = out + row[:, None] * RANK + dim[None, :]
        tl.store(there, seen.to(out.dtype.element_ty), mask=is_head & is_dim)
    else:
        row = row * tl.num_programs(1) + part
        tl.store(sums + row[:, None] * RANK + dim[None, :], seen, mask=is_head & is_dim)
        tl.store(logs + row, highest + tl.log2(total), mask=head < num_heads)


@triton.jit(do_not_specialize=ANY_SIZE, do_not_specialize_on_alignment=ANY_PLACE)
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
    _, begin_all, each = in_parts(length, window, fewest, num_parts, KEYS, HAS_WINDOW)
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


def decode(
    query: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, rank: int, scale: float, window: int | None
) -> Tensor:
    """See `latent_decode`."""
    (num_sequences, num_heads, width), block_size = query.shape, cache.shape[1]
    out = torch.empty((num_sequences, num_heads, rank), dtype=query.dtype, device=query.device)
    if not num_sequences:
        return out
    tiles = triton.cdiv(num_heads, HEADS)
    longest = tables.shape[1] * block_size
    parts, fewest = count_parts(num_sequences, tiles, longest, num_processors(query.device), PROGRAMS)
    # With one part nothing is stored here, but the argument has the same type, so that one compiled kernel serves both.
    rows = num_sequences if parts > 1 else 0
    sums = torch.empty((rows, num_heads, parts, rank), dtype=torch.float32, device=query.device)
    logs = torch.empty((rows, num_heads, parts), dtype=torch.float32, device=query.device)
    dim, turned_dim = (max(16, triton.next_power_of_2(each)) for each in (rank, width - rank))
    has_window = window is not None
    launch(
        _latent_decode, (tiles, parts, num_sequences),
        query, cache, tables, lengths, out, sums, logs, scale * LOG2_E, window or 0, fewest,
        query.stride(0), query.stride(1), cache.stride(0), cache.stride(1), tables.stride(0), num_heads,
        RANK=rank, RANK_DIM=dim, TURNED=width - rank, TURNED_DIM=turned_dim, HEADS=HEADS, BLOCK_SIZE=block_size,
        KEYS=KEYS, HAS_WINDOW=has_window, PRECISION=precision_of(query.dtype),
        num_warps=WARPS, num_stages=STAGES, **overlapping(query.device),
    )  # fmt: skip
    if parts > 1:
        _join_parts(sums, logs, lengths, out, window, fewest, HEAD_DIM=rank, DIM=dim, KEYS=KEYS, HAS_WINDOW=has_window)
    return out


def _join_parts(
    sums: Tensor, logs: Tensor, lengths: Tensor, out: Tensor, window: int | None, fewest: int, *, DIM: int, **sizes: int
) -> None:  # fmt: skip
    """Combine the outputs of the parts of contexts, [sequences, heads, parts, dim]."""
    num_sequences, num_heads, parts, _ = sums.shape
    # One size for few parts and another for many: each is compiled once.
    most = 8 if parts <= 8 else MOST_PARTS
    launch(
        _put_together, (num_heads, num_sequences),
        sums, logs, lengths, out, window or 0, fewest, num_heads, parts, DIM=DIM, PARTS=most, **sizes,
        num_warps=max(2 if most == 8 else 4, most * DIM // 2048), **overlapping(out.device),
    )  # fmt: skip
