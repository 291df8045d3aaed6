"""The program of `row_linear.py`: some rows of the weight a program.

`CODES` is the kind of a weight in fewer bits (`narrow.py`), or nothing. In fp8 a row's scale is put on its sum; in 4
bits a tile is [rows, pairs of groups, bytes], and scales and lowest values are put on the sums of groups.
"""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.device_functions import activate, prefetch_rows
from shardwise.kernels.launch import overlapping
from shardwise.kernels.narrow import GROUP, PAIR, NarrowWeight
from shardwise.kernels.widen_triton import from_eight_bits, from_four_bits, half_of, is_fast, scales_of

#: Numbers of the weight that a program has at a time, the most columns of them, tiles that are on their way, warps, and
#: how many bytes of a row are fetched into the cache while the kernel before ends. `benchmarks/serving.py --cases rows`
#: tries others.
TILE, COLUMNS, STAGES, WARPS, AHEAD = 16384, 1024, 3, 8, 2048
#: Tiles of narrow weights that are on their way: they are smaller.
NARROW_STAGES = 5
_GROUP, _PAIR = tl.constexpr(GROUP), tl.constexpr(PAIR)


@triton.jit
def _four_bit_sums(rows, steps, begin, k, is_row, one, two, FAST: tl.constexpr):
    """Rows of a tile times what is given to the low and to the high bits of its bytes."""
    pair = begin // _PAIR + tl.arange(0, one.shape[0])[None, :, None]
    mask = is_row[:, None, None] & (pair * _PAIR < k)
    inside = tl.arange(0, _GROUP)[None, None, :]
    byte = tl.load(rows[:, :, None] + pair * _GROUP + inside, mask=mask, other=0, eviction_policy="evict_first")
    pair = begin // _PAIR + tl.arange(0, one.shape[0])[None, :]
    step = tl.load(steps + pair, mask=is_row[:, None] & (pair * _PAIR < k), other=0)
    low = tl.sum(from_four_bits(byte, False, FAST).to(tl.float32) * one[None], 2)
    high = tl.sum(from_four_bits(byte, True, FAST).to(tl.float32) * two[None], 2)
    # Sums are scaled, not weights: there are fewer of them.
    made = low * half_of(step, 0) + tl.sum(one, 1)[None, :] * half_of(step, 1)
    return tl.sum(made + high * half_of(step, 2) + tl.sum(two, 1)[None, :] * half_of(step, 3), 1)


@triton.jit
def _normed_piece(
    x, residual, norm, column, is_column, rstd, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Some numbers of the row that is multiplied, rounded where the definition rounds."""
    own = tl.load(x + column, mask=is_column, other=0.0)
    value = own.to(tl.float32)
    if HAS_RESIDUAL:
        value = (
            (value + tl.load(residual + column, mask=is_column, other=0.0).to(tl.float32)).to(own.dtype).to(tl.float32)
        )
    if HAS_NORM:
        value = value * rstd * tl.load(norm + column, mask=is_column, other=0.0).to(tl.float32)
        value = value.to(own.dtype).to(tl.float32)
    return value


@triton.jit
def _row_linear(
    x, weight, scales, bias, residual, norm, out, new, n, k, stride, eps,
    CODES: tl.constexpr, FAST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < n
    column = tl.arange(0, COLUMNS)
    there = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    here = weight + there * stride
    under = weight + (there + n) * stride
    if AHEAD > 0:  # The weight is asked for before anything else: the rest is done while it comes.
        prefetch_rows(here, stride, AHEAD)
        if ACTIVATION != "":
            prefetch_rows(under, stride, AHEAD)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    rstd = 1.0
    if HAS_NORM:
        squares = tl.zeros((COLUMNS,), tl.float32)
        for begin in range(0, k, COLUMNS):
            at = begin + column
            value = _normed_piece(x, residual, norm, at, at < k, 1.0, HAS_RESIDUAL, False)
            squares += value * value
            if HAS_RESIDUAL:
                if tl.program_id(0) == 0:
                    tl.store(new + at, value.to(new.dtype.element_ty), mask=at < k)
        rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / k + eps)
    total = tl.zeros((ROWS,), tl.float32)
    other = tl.zeros((ROWS,), tl.float32)
    for begin in tl.range(0, k, COLUMNS, num_stages=STAGES):
        if CODES == "int4":
            at = begin + tl.arange(0, COLUMNS // _PAIR)[:, None] * _PAIR + tl.arange(0, _GROUP)[None, :]
            one = _normed_piece(x, residual, norm, at, at < k, rstd, HAS_RESIDUAL, HAS_NORM)
            at += _GROUP
            two = _normed_piece(x, residual, norm, at, at < k, rstd, HAS_RESIDUAL, HAS_NORM)
            num_pairs = stride // _GROUP
            total += _four_bit_sums(here, scales + there * num_pairs, begin, k, is_row, one, two, FAST)
            if ACTIVATION != "":
                other += _four_bit_sums(under, scales + (there + n) * num_pairs, begin, k, is_row, one, two, FAST)
        else:
            at = begin + column
            mask = is_row[:, None] & (at < k)[None, :]
            tile = tl.load(here + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            value = _normed_piece(x, residual, norm, at, at < k, rstd, HAS_RESIDUAL, HAS_NORM)
            total += tl.sum(from_eight_bits(tile, FAST).to(tl.float32) * value[None, :], 1)
            if ACTIVATION != "":
                beneath = tl.load(under + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
                other += tl.sum(from_eight_bits(beneath, FAST).to(tl.float32) * value[None, :], 1)
    if CODES == "fp8":
        total *= tl.load(scales + row, mask=is_row, other=0.0)
        if ACTIVATION != "":
            other *= tl.load(scales + n + row, mask=is_row, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    made = total.to(out.dtype.element_ty)
    if ACTIVATION != "":
        if HAS_BIAS:
            other += tl.load(bias + n + row, mask=is_row, other=0.0).to(tl.float32)
        gate = activate(made.to(tl.float32), ACTIVATION).to(made.dtype).to(tl.float32)
        made = (gate * other.to(made.dtype).to(tl.float32)).to(made.dtype)
    tl.store(out + row, made, mask=is_row)


def forward(
    x: Tensor, weight: Tensor | NarrowWeight, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None,
    eps: float, activation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `row_linear`."""
    num_rows, k = weight.shape
    n = num_rows if activation is None else num_rows // 2
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    new = x if residual is None else torch.empty_like(x)
    is_narrow = isinstance(weight, NarrowWeight)
    columns = min(COLUMNS, max(triton.next_power_of_2(k), PAIR))
    rows = max(TILE // columns // (1 if activation is None else 2), 1)
    overlap = overlapping(x.device)
    # Older processors have less shared memory for what is on its way.
    stages = STAGES if overlap["OVERLAPS"] and x.element_size() == 2 else 2
    codes = weight.codes if is_narrow else weight
    _row_linear[(triton.cdiv(n, rows),)](
        x, codes, scales_of(weight) if is_narrow else None, bias, residual, norm, out, new, n, k, codes.shape[1], eps,
        CODES=weight.kind if is_narrow else "", FAST=is_narrow and is_fast(weight),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None,
        ACTIVATION=activation or "", ROWS=rows, COLUMNS=columns, STAGES=NARROW_STAGES if is_narrow else stages,
        AHEAD=AHEAD if x.is_cuda else 0, num_warps=WARPS, **overlap,
    )  # fmt: skip
    return out, new
