"""The program of `few_rows_linear.py`: some rows of the weight a program, and all rows of x, or a tile of them.

`CODES` is the kind of a weight in fewer bits (`narrow.py`), or nothing. In fp8 a row's scale is put on its sums.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.device_functions import activate, dot, precision_of, prefetch_rows
from shardwise.kernels.launch import is_on_gpu, launch, overlapping
from shardwise.kernels.narrow import RUN, NarrowWeight
from shardwise.kernels.widen_triton import (
    EIGHTS,
    FOURS,
    OFFSET,
    from_eight_bits,
    from_four_bits,
    half_of,
    is_fast,
    scales_of,
)


class Tile(NamedTuple):
    """Rows and columns of the weight that a program has at a time, how many tiles are on their way, and warps."""

    rows: int
    columns: int
    stages: int
    warps: int


#: Without a gate, of weights with narrow and with wide rows, and with one, whose program has two tiles at a time; and
#: how many bytes of a row are fetched into the cache while the kernel before ends. `benchmarks/serving.py --cases rows`
#: tries others.
NARROW, WIDE, GATED, AHEAD = Tile(64, 128, 6, 4), Tile(32, 256, 6, 2), Tile(64, 64, 5, 4), 1024
#: Of weights in fewer bits: what is read of x is as much as what is read of them, so programs have many rows. In 4 bits
#: the columns are those that share words.
EIGHT_BITS, FOUR_BITS = Tile(64, 256, 3, 4), Tile(64, RUN, 4, 4)
#: From so many columns on rows are wide: then programs of fewer of them have enough on its way, and there are more.
MANY_COLUMNS = 4096
#: The fewest columns of a tile of x, as tensor cores ask, and the most.
FEWEST, MOST = 16, 64
_RUN = tl.constexpr(RUN)


@triton.jit
def _given(x, item, m, at, k):
    """Some columns of the rows of x, as a product takes them."""
    return tl.load(x + item[None, :] * k + at[:, None], mask=(item < m)[None, :], other=0.0)


@triton.jit
def _times_eight_bits(total, words, x, item, m, begin, k, PRECISION: tl.constexpr, FAST: tl.constexpr):
    """Add a tile of the weight times what is given to it, one place of its words after the other."""
    word = tl.arange(0, words.shape[1])
    for place in tl.static_range(4):
        given = _given(x, item, m, begin + word // EIGHTS * _RUN + place * EIGHTS + word % EIGHTS, k)
        total += dot(from_eight_bits(words, place, FAST).to(given.dtype), given, PRECISION)
    return total


@triton.jit
def _times_four_bits(total, words, steps, x, item, m, begin, k, PRECISION: tl.constexpr, FAST: tl.constexpr):
    """The same of 4 bits. Sums are scaled, not weights: there are fewer of them. What is given is summed as a product
    with ones, whose sums lie where the others do."""
    ones = tl.full(words.shape, 1.0, x.dtype.element_ty)
    for group in tl.static_range(2):
        made = tl.zeros(total.shape, tl.float32)
        whole = tl.zeros(total.shape, tl.float32)
        for place in tl.static_range(4):
            given = _given(x, item, m, tl.arange(0, FOURS) + begin + (group * 4 + place) * FOURS, k)
            made += dot(from_four_bits(words, group * 4 + place, FAST).to(given.dtype), given, PRECISION)
            whole += dot(ones, given, PRECISION)
        scale = half_of(steps, 2 * group)
        total += made * scale + whole * (half_of(steps, 2 * group + 1) - OFFSET * scale)
    return total


@triton.jit(do_not_specialize=["m"])
def _few_rows_linear(
    x, weight, scales, bias, out, m, n, k, stride,
    CODES: tl.constexpr, FAST: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    # Tiles of x come first: programs that read the same of the weight run at the same time.
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Beyond the last row the last is read again, and not written.
    there = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    here = weight + there * stride
    under = weight + (there + n) * stride
    if AHEAD > 0:
        prefetch_rows(here, stride, AHEAD)
        if ACTIVATION != "":
            prefetch_rows(under, stride, AHEAD)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    item = tl.program_id(0) * M + tl.arange(0, M)
    total = tl.zeros((ROWS, M), tl.float32)
    other = tl.zeros((ROWS, M), tl.float32)
    for begin in tl.range(0, k, COLUMNS, num_stages=STAGES):
        if CODES == "fp8":
            column = begin // 4 + tl.arange(0, COLUMNS // 4)[None, :]
            words = tl.load(here + column, eviction_policy="evict_first")
            total = _times_eight_bits(total, words, x, item, m, begin, k, PRECISION, FAST)
            if ACTIVATION != "":
                words = tl.load(under + column, eviction_policy="evict_first")
                other = _times_eight_bits(other, words, x, item, m, begin, k, PRECISION, FAST)
        elif CODES == "int4":
            column = begin // 8 + tl.arange(0, FOURS)[None, :]
            run = begin // _RUN
            words = tl.load(here + column, eviction_policy="evict_first")
            steps = tl.load(scales + there * (stride // FOURS) + run)
            total = _times_four_bits(total, words, steps, x, item, m, begin, k, PRECISION, FAST)
            if ACTIVATION != "":
                words = tl.load(under + column, eviction_policy="evict_first")
                steps = tl.load(scales + (there + n) * (stride // FOURS) + run)
                other = _times_four_bits(other, words, steps, x, item, m, begin, k, PRECISION, FAST)
        else:
            at = begin + tl.arange(0, COLUMNS)
            tile = tl.load(here + at[None, :], eviction_policy="evict_first")
            given = _given(x, item, m, at, k)
            total += dot(tile, given, PRECISION)
            if ACTIVATION != "":
                other += dot(tl.load(under + at[None, :], eviction_policy="evict_first"), given, PRECISION)
    is_row = row < n
    if CODES == "fp8":
        total *= tl.load(scales + row, mask=is_row, other=0.0)[:, None]
        if ACTIVATION != "":
            other *= tl.load(scales + n + row, mask=is_row, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    made = total.to(out.dtype.element_ty)
    if ACTIVATION != "":
        if HAS_BIAS:
            other += tl.load(bias + n + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
        # Rounded where the definition rounds.
        gate = activate(made.to(tl.float32), ACTIVATION).to(made.dtype).to(tl.float32)
        made = (gate * other.to(made.dtype).to(tl.float32)).to(made.dtype)
    tl.store(out + item[None, :] * n + row[:, None], made, mask=(item < m)[None, :] & is_row[:, None])


def forward(x: Tensor, weight: Tensor | NarrowWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """See `few_rows_linear`."""
    (m, k), num_rows = x.shape, weight.shape[0]
    n = num_rows if activation is None else num_rows // 2
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    is_narrow = isinstance(weight, NarrowWeight)
    codes, tile = (weight.codes if is_narrow else weight), _tile_for(weight, k, activation is not None)
    columns = tile.columns
    while k % columns:
        columns //= 2
    rows_of_x = min(max(FEWEST, triton.next_power_of_2(m)), MOST)
    launch(
        _few_rows_linear, (triton.cdiv(m, rows_of_x), triton.cdiv(n, tile.rows)),
        x, codes, scales_of(weight) if is_narrow else None, bias, out, m, n, k, codes.shape[1],
        CODES=weight.kind if is_narrow else "", FAST=is_narrow and is_fast(weight), HAS_BIAS=bias is not None,
        ACTIVATION=activation or "", M=rows_of_x, ROWS=tile.rows, COLUMNS=columns, STAGES=tile.stages,
        AHEAD=AHEAD if is_on_gpu(x) else 0,
        PRECISION=precision_of(x.dtype), num_warps=tile.warps, **overlapping(x.device),
    )  # fmt: skip
    return out


def _tile_for(weight: Tensor | NarrowWeight, k: int, has_gate: bool) -> Tile:
    if isinstance(weight, NarrowWeight):
        return EIGHT_BITS if weight.kind == "fp8" else FOUR_BITS
    return GATED if has_gate else WIDE if k >= MANY_COLUMNS else NARROW
