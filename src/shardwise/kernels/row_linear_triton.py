"""The kernel of `row_linear.py`: a program has some rows of the weight.

`CODES` is the kind of a quantised weight (`narrow.py`), or empty; then tiles are [rows, runs, words]. In fp8 a row's
scale is applied to its sum; in 4 bits scales and lowest values are applied to the sums of groups.
"""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.device_functions import activate, prefetch_rows
from shardwise.kernels.launch import is_on_gpu, launch, overlapping
from shardwise.kernels.narrow import RUN, NarrowWeight
from shardwise.kernels.widen_triton import (
    EIGHTS,
    FOURS,
    HALF_SHIFT,
    OFFSET,
    eight_bits_shifted,
    four_bits_shifted,
    scales_of,
    step_of,
    steps_of,
)


class RowTile(NamedTuple):
    """Elements of the weight per iteration of a program, the most columns of them, pipeline stages, and warps."""

    numbers: int
    columns: int
    stages: int
    warps: int


#: For unquantised weights: without a gate, and with one, for narrow and for wide rows; and how many bytes of a row are
#: prefetched while the previous kernel ends. `benchmarks/serving.py --cases rows` tries others.
WIDE, GATED, GATED_WIDE, AHEAD = (
    RowTile(16384, 1024, 3, 8),
    RowTile(16384, 1024, 2, 8),
    RowTile(16384, 2048, 2, 4),
    2048,
)
#: Rows of up to so many columns are one tile, which a program loads before it waits for the previous kernel: what is in
#: registers by then need not come from the cache later. On an H200 a decode step of Qwen3-0.6B, whose widest rows have
#: 3,072 columns, took .75 ms with it and .89 without (`benchmarks/decode_settings.py`, which tries others).
WHOLE_ROWS = 3072
#: For quantised weights: after a norm, which every program computes for itself, and without one.
EIGHT_BITS_NORMED, EIGHT_BITS, FOUR_BITS = (
    RowTile(16384, 1024, 2, 8),
    RowTile(16384, 2048, 2, 8),
    RowTile(16384, 2048, 2, 4),
)
#: From this many columns on rows are wide.
MANY_COLUMNS = 2048
_RUN = tl.constexpr(RUN)


@triton.jit
def _words(rows, begin, k, is_row, RUNS: tl.constexpr, WORDS: tl.constexpr):
    """Load the words of some runs of rows."""
    run = begin // _RUN + tl.arange(0, RUNS)[None, :, None]
    there = rows[:, :, None] + run * WORDS + tl.arange(0, WORDS)[None, None, :]
    return tl.load(there, mask=is_row[:, None, None] & (run * _RUN < k), other=0, eviction_policy="evict_first")


@triton.jit
def _steps(steps, begin, k, is_row, RUNS: tl.constexpr):
    """Load scales and lowest values of some runs of rows."""
    run = begin // _RUN + tl.arange(0, RUNS)[None, :]
    return tl.load(steps + run, mask=is_row[:, None] & (run * _RUN < k), other=0)


@triton.jit
def _columns(begin, PLACE: tl.constexpr, RUNS: tl.constexpr, WORDS: tl.constexpr):
    """Return the inputs at one position of words."""
    return begin + PLACE * WORDS + tl.arange(0, RUNS)[:, None] * _RUN + tl.arange(0, WORDS)[None, :]


@triton.jit
def _scaled(made, whole, steps, GROUP: tl.constexpr, STEPS: tl.constexpr):
    """Return a group's sums times its scale, plus the sum of its inputs times its lowest value."""
    scale = step_of(steps, 2 * GROUP, STEPS)
    low = step_of(steps, 2 * GROUP + 1, STEPS) - OFFSET * scale
    return made * scale[:, :, None] + whole[None] * low[:, :, None]


@triton.jit
def _normed_piece(
    x, residual, norm, column, is_column, rstd, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Return some elements of the normed input row, rounded where the definition rounds."""
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
def _rstd(x, residual, norm, new, k, eps, HAS_RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the norm's factor for the row. The first program stores the new residual."""
    squares = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, k, COLUMNS):
        at = begin + tl.arange(0, COLUMNS)
        value = _normed_piece(x, residual, norm, at, at < k, 1.0, HAS_RESIDUAL, False)
        squares += value * value
        if HAS_RESIDUAL:
            if tl.program_id(0) == 0:
                tl.store(new + at, value.to(new.dtype.element_ty), mask=at < k)
    return 1.0 / tl.sqrt(tl.sum(squares, 0) / k + eps)


@triton.jit
def _times_eight_bits(
    total, other, here, under, begin, k, is_row, x, residual, norm, rstd,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Add a tile of the weight, and of the one below it with a gate, times its part of the input, one position of words
    after another."""
    words = _words(here, begin, k, is_row, total.shape[1], EIGHTS)
    if ACTIVATION != "":
        beneath = _words(under, begin, k, is_row, total.shape[1], EIGHTS)
    for place in tl.static_range(4):
        at = _columns(begin, place, total.shape[1], EIGHTS)
        value = _normed_piece(x, residual, norm, at, at < k, rstd, HAS_RESIDUAL, HAS_NORM) * HALF_SHIFT
        total += eight_bits_shifted(words, place) * value[None]
        if ACTIVATION != "":
            other += eight_bits_shifted(beneath, place) * value[None]
    return total, other


@triton.jit
def _times_four_bits(
    total, other, here, under, steps, steps_under, begin, k, is_row, x, residual, norm, rstd,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, ACTIVATION: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The same for 4 bits, one group after another."""
    words = _words(here, begin, k, is_row, total.shape[1], FOURS)
    step = _steps(steps, begin, k, is_row, total.shape[1])
    if ACTIVATION != "":
        beneath = _words(under, begin, k, is_row, total.shape[1], FOURS)
        step_under = _steps(steps_under, begin, k, is_row, total.shape[1])
    for group in tl.static_range(2):
        made = tl.zeros(total.shape, tl.float32)
        under_made = tl.zeros(total.shape, tl.float32)
        whole = tl.zeros(total.shape[1:], tl.float32)
        for place in tl.static_range(4 * group, 4 * group + 4):
            at = _columns(begin, place, total.shape[1], FOURS)
            value = _normed_piece(x, residual, norm, at, at < k, rstd, HAS_RESIDUAL, HAS_NORM)
            whole += value
            made += four_bits_shifted(words, place) * value[None]
            if ACTIVATION != "":
                under_made += four_bits_shifted(beneath, place) * value[None]
        total += _scaled(made, whole, step, group, STEPS)
        if ACTIVATION != "":
            other += _scaled(under_made, whole, step_under, group, STEPS)
    return total, other


@triton.jit
def _finish(
    total, other, scales, bias, out, row, n, CODES: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Apply scale, bias and gate to the sums, and store them."""
    is_row = row < n
    if CODES == "fp8":
        total *= tl.load(scales + row, mask=is_row, other=0.0) * HALF_SHIFT
        if ACTIVATION != "":
            other *= tl.load(scales + n + row, mask=is_row, other=0.0) * HALF_SHIFT
    if HAS_BIAS:
        total += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    made = total.to(out.dtype.element_ty)
    if ACTIVATION != "":
        if HAS_BIAS:
            other += tl.load(bias + n + row, mask=is_row, other=0.0).to(tl.float32)
        gate = activate(made.to(tl.float32), ACTIVATION).to(made.dtype).to(tl.float32)
        made = (gate * other.to(made.dtype).to(tl.float32)).to(made.dtype)
    tl.store(out + row, made, mask=is_row)


@triton.jit
def _row_linear(
    x, weight, scales, bias, residual, norm, out, new, n, k, stride, eps,
    CODES: tl.constexpr, STEPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, IS_WHOLE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < n
    column = tl.arange(0, COLUMNS)
    there = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    here = weight + there * stride
    under = weight + (there + n) * stride
    if IS_WHOLE:
        whole = is_row[:, None] & (column < k)[None, :]
        tile = tl.load(here + column[None, :], mask=whole, other=0.0, eviction_policy="evict_first")
        if ACTIVATION != "":
            beneath = tl.load(under + column[None, :], mask=whole, other=0.0, eviction_policy="evict_first")
    elif AHEAD > 0:  # Request the weight before anything else: the rest is computed while it arrives.
        prefetch_rows(here, stride, AHEAD)
        if ACTIVATION != "":
            prefetch_rows(under, stride, AHEAD)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    rstd = 1.0
    if HAS_NORM:
        rstd = _rstd(x, residual, norm, new, k, eps, HAS_RESIDUAL, COLUMNS)
    num_runs: tl.constexpr = COLUMNS // _RUN
    if CODES == "":
        total = tl.zeros((ROWS,), tl.float32)
        other = tl.zeros((ROWS,), tl.float32)
    else:  # Keep separate partial sums, which are added up per row at the end.
        total = tl.zeros((ROWS, num_runs, EIGHTS if CODES == "fp8" else FOURS), tl.float32)
        other = tl.zeros((ROWS, num_runs, EIGHTS if CODES == "fp8" else FOURS), tl.float32)
    if IS_WHOLE:
        value = _normed_piece(x, residual, norm, column, column < k, rstd, HAS_RESIDUAL, HAS_NORM)
        total = tl.sum(tile.to(tl.float32) * value[None, :], 1)
        if ACTIVATION != "":
            other = tl.sum(beneath.to(tl.float32) * value[None, :], 1)
    for begin in tl.range(0, 0 if IS_WHOLE else k, COLUMNS, num_stages=STAGES):
        if CODES == "fp8":
            total, other = _times_eight_bits(
                total, other, here, under, begin, k, is_row, x, residual, norm, rstd,
                HAS_RESIDUAL, HAS_NORM, ACTIVATION,
            )  # fmt: skip
        elif CODES == "int4":
            steps = scales + there * (stride // FOURS)
            total, other = _times_four_bits(
                total, other, here, under, steps, steps + n * (stride // FOURS), begin, k, is_row,
                x, residual, norm, rstd, HAS_RESIDUAL, HAS_NORM, ACTIVATION, STEPS,
            )  # fmt: skip
        else:
            at = begin + column
            mask = is_row[:, None] & (at < k)[None, :]
            tile = tl.load(here + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            value = _normed_piece(x, residual, norm, at, at < k, rstd, HAS_RESIDUAL, HAS_NORM)
            total += tl.sum(tile.to(tl.float32) * value[None, :], 1)
            if ACTIVATION != "":
                beneath = tl.load(under + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
                other += tl.sum(beneath.to(tl.float32) * value[None, :], 1)
    if CODES != "":
        total = tl.sum(tl.sum(total, 2), 1)
        other = tl.sum(tl.sum(other, 2), 1)
    _finish(total, other, scales, bias, out, row, n, CODES, HAS_BIAS, ACTIVATION)


def forward(
    x: Tensor, weight: Tensor | NarrowWeight, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None,
    eps: float, activation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `row_linear`."""
    num_rows, k = weight.shape
    n = num_rows if activation is None else num_rows // 2
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    new = x if residual is None else torch.empty_like(x)
    is_narrow, overlap = isinstance(weight, NarrowWeight), overlapping(x.device)
    codes = weight.codes if is_narrow else weight
    tile = _tile_for(weight, has_norm=norm is not None, has_gate=activation is not None)
    is_whole = not is_narrow and k <= WHOLE_ROWS
    columns = max(triton.next_power_of_2(k), RUN)
    columns = columns if is_whole else min(tile.columns, columns)
    rows = max(tile.numbers // columns // (1 if activation is None else 2), 1)
    # Older GPUs have less shared memory for tiles in flight.
    stages = tile.stages if overlap["OVERLAPS"] and x.element_size() == 2 else 2
    launch(
        _row_linear, (triton.cdiv(n, rows),),
        x, codes, scales_of(weight) if is_narrow else None, bias, residual, norm, out, new, n, k, codes.shape[1], eps,
        CODES=weight.kind if is_narrow else "", STEPS=steps_of(weight) if is_narrow else "",
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None,
        ACTIVATION=activation or "", ROWS=rows, COLUMNS=columns, STAGES=stages,
        AHEAD=AHEAD if is_on_gpu(x) else 0, IS_WHOLE=is_whole, num_warps=tile.warps, **overlap,
    )  # fmt: skip
    return out, new


def _tile_for(weight: Tensor | NarrowWeight, *, has_norm: bool, has_gate: bool) -> RowTile:
    if isinstance(weight, NarrowWeight):
        eight = EIGHT_BITS_NORMED if has_norm else EIGHT_BITS
        return eight if weight.kind == "fp8" else FOUR_BITS
    gated = GATED_WIDE if weight.shape[1] >= MANY_COLUMNS else GATED
    return gated if has_gate else WIDE
