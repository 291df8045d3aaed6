"""The program of `row_linear.py`: some rows of the weight a program.

`CODES` is the kind of a weight in fewer bits (`narrow.py`), or nothing. In fp8 a row's scale is put on its sum; in 4
bits a tile is [rows, pairs of groups, bytes], and its weights are made wide one by one. Compiled for Hopper that is 8.5
instructions a weight, where fp8 has 5.0 and bf16 5.9: with one row 4 bits are bound by those, not by their bytes.
"""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.gated_triton import _activate
from shardwise.kernels.launch import overlapping
from shardwise.kernels.narrow import GROUP, PAIR, NarrowWeight
from shardwise.kernels.widen_triton import high_bits, low_bits, scales_of

#: Numbers of the weight that a program has at a time, the most columns of them, tiles that are on their way, warps, and
#: how many bytes of a row are fetched into the cache while the kernel before ends. `benchmarks/serving.py --cases rows`
#: tries others.
TILE, COLUMNS, STAGES, WARPS, AHEAD = 16384, 1024, 3, 8, 2048
#: Tiles of narrow weights that are on their way: they are smaller.
NARROW_STAGES = 5
#: Bytes in a line of the cache.
LINE = tl.constexpr(128)
_GROUP, _PAIR = tl.constexpr(GROUP), tl.constexpr(PAIR)


@triton.jit
def prefetch(addresses):
    """Have lines of memory come into the cache, and go on."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_rows(rows, stride, AHEAD: tl.constexpr):
    """The beginning of rows of a weight, `AHEAD` bytes of each."""
    each: tl.constexpr = LINE // (rows.dtype.element_ty.primitive_bitwidth // 8)
    line = tl.minimum(tl.arange(0, AHEAD // LINE) * each, stride - 1)
    prefetch(rows + line[None, :])


@triton.jit
def _four_bit_sums(rows, steps, begin, k, is_row, one, two):
    """Rows of a tile times what is given to the low and to the high bits of its bytes."""
    pair = begin // _PAIR + tl.arange(0, one.shape[0])[None, :, None]
    mask = is_row[:, None, None] & (pair * _PAIR < k)
    inside = tl.arange(0, _GROUP)[None, None, :]
    byte = tl.load(rows[:, :, None] + pair * _GROUP + inside, mask=mask, other=0, eviction_policy="evict_first")
    step = tl.load(steps[:, :, None] + pair, mask=mask, other=0)
    return tl.sum(tl.sum(low_bits(byte, step) * one[None] + high_bits(byte, step) * two[None], 2), 1)


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
    CODES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
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
            total += _four_bit_sums(here, scales + there * num_pairs, begin, k, is_row, one, two)
            if ACTIVATION != "":
                other += _four_bit_sums(under, scales + (there + n) * num_pairs, begin, k, is_row, one, two)
        else:
            at = begin + column
            mask = is_row[:, None] & (at < k)[None, :]
            tile = tl.load(here + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            value = _normed_piece(x, residual, norm, at, at < k, rstd, HAS_RESIDUAL, HAS_NORM)
            total += tl.sum(tile.to(tl.float32) * value[None, :], 1)
            if ACTIVATION != "":
                beneath = tl.load(under + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
                other += tl.sum(beneath.to(tl.float32) * value[None, :], 1)
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
        gate = _activate(made.to(tl.float32), ACTIVATION).to(made.dtype).to(tl.float32)
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
    manner = overlapping(x.device)
    # Older processors have less shared memory for what is on its way.
    stages = STAGES if manner["OVERLAPS"] and x.element_size() == 2 else 2
    codes = weight.codes if is_narrow else weight
    _row_linear[(triton.cdiv(n, rows),)](
        x, codes, scales_of(weight) if is_narrow else None, bias, residual, norm, out, new, n, k, codes.shape[1], eps,
        CODES=weight.kind if is_narrow else "",
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None,
        ACTIVATION=activation or "", ROWS=rows, COLUMNS=columns, STAGES=NARROW_STAGES if is_narrow else stages,
        AHEAD=AHEAD if x.is_cuda else 0, num_warps=WARPS, **manner,
    )  # fmt: skip
    return out, new
