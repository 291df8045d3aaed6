"""The kernel of `few_rows_linear.py`: a program has some rows of the weight, and all rows of x or a tile of them.

`CODES` is the kind of a quantised weight (`narrow.py`), or empty. In fp8 a row's scale is applied to its sums.

If that makes too few programs for a GPU, columns are split over several programs too (split-K). Each program stores its
partial sums, and the last one to finish adds them in the order of columns, so the result does not depend on which one
is last. Programs with fewer rows would read x more often, which for a quantised weight is more than the weight itself.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.device_functions import activate, dot, precision_of, prefetch_rows
from shardwise.kernels.launch import is_on_gpu, launch, num_processors, overlapping
from shardwise.kernels.narrow import RUN, NarrowWeight
from shardwise.kernels.widen_triton import (
    EIGHTS,
    FOURS,
    OFFSET,
    from_eight_bits,
    from_four_bits,
    is_fast,
    scaled_four_bits,
    scales_of,
    step_of,
    steps_of,
)


class Tile(NamedTuple):
    """Rows and columns of the weight per iteration of a program, pipeline stages, and warps; the wanted number of
    programs per multiprocessor, reached by splitting columns; and whether a tile of codes is multiplied at once, or
    one position of its words after another."""

    rows: int
    columns: int
    stages: int
    warps: int
    programs: int = 0
    is_whole: bool = False


#: Without a gate, for weights with narrow and with wide rows; with a gate, where a program has two tiles at a time; and
#: how many bytes of a row are prefetched while the previous kernel ends. `benchmarks/decode_settings.py` tries others.
NARROW, WIDE, GATED, AHEAD = Tile(64, 128, 6, 4), Tile(64, 128, 6, 4, 1), Tile(32, 128, 4, 2), 1024
#: The same two for more than this many rows of x, of which a program holds larger sums.
FEW, WIDE_MORE, GATED_MORE = 32, Tile(32, 256, 6, 2), Tile(64, 64, 5, 4)
#: For quantised weights, by kind and whether there is a gate, for up to this many rows of x: the fastest of those tried
#: on an H200 with the products of an 8B model (2026-11-18). Programs read as much of x as of the weight, so they have
#: many rows. The products within a program depend on each other, so a multiprocessor should have several programs, with
#: tiles small enough that they fit. `benchmarks/narrow_tiles.py` tries others, also tiles that are multiplied at once:
#: those have run in Triton's interpreter only. In 4 bits the number of columns is that of a run, which shares words.
NARROW_TILES = {
    ("fp8", False): {16: Tile(64, 256, 3, 4, 4), 32: Tile(64, 256, 3, 4, 2), 64: Tile(64, 128, 4, 4, 2)},
    ("fp8", True): {16: Tile(64, 128, 4, 4, 4), 32: Tile(64, 256, 3, 4, 2), 64: Tile(64, 128, 3, 4, 2)},
    ("int4", False): {16: Tile(64, RUN, 3, 4, 4), 32: Tile(64, RUN, 3, 4, 4), 64: Tile(64, RUN, 3, 4, 2)},
    ("int4", True): {16: Tile(64, RUN, 3, 4, 4), 32: Tile(64, RUN, 3, 4, 2), 64: Tile(64, RUN, 3, 4, 2)},
}
#: From this many columns on, rows are wide: programs with fewer rows then have enough loads in flight.
MANY_COLUMNS = 4096
#: The fewest columns of a tile of x, as tensor cores require, and the most.
FEWEST, MOST = 16, 64
#: The fewest tiles per program; and the most output tiles that may be split, which bounds the counters.
FEWEST_TILES, MOST_COUNTED = 4, 4096
_RUN = tl.constexpr(RUN)


@triton.jit
def _given(x, item, at, k):
    """Load some columns of the rows of x, as the operand of a product."""
    return tl.load(x + item[None, :] * k + at[:, None])


@triton.jit
def _wide_eight_bits(words, COLUMNS: tl.constexpr, FAST: tl.constexpr):
    """Convert all positions of words to one tile with columns in order. A thread keeps its own words: no exchange."""
    one = tl.join(from_eight_bits(words, 0, FAST), from_eight_bits(words, 2, FAST))
    two = tl.join(from_eight_bits(words, 1, FAST), from_eight_bits(words, 3, FAST))
    made = tl.reshape(tl.join(one, two), (words.shape[0], COLUMNS // _RUN, EIGHTS, 2, 2))
    return tl.reshape(tl.permute(made, (0, 1, 3, 4, 2)), (words.shape[0], COLUMNS))


@triton.jit
def _wide_four_bits(words, steps, STEPS: tl.constexpr, FAST: tl.constexpr):
    """The same for a run of 4-bit codes, with scales and lowest values: the numbers of the definition."""
    pairs = tl.join(
        tl.join(_scaled(words, steps, 0, STEPS, FAST), _scaled(words, steps, 4, STEPS, FAST)),
        tl.join(_scaled(words, steps, 2, STEPS, FAST), _scaled(words, steps, 6, STEPS, FAST)),
    )
    others = tl.join(
        tl.join(_scaled(words, steps, 1, STEPS, FAST), _scaled(words, steps, 5, STEPS, FAST)),
        tl.join(_scaled(words, steps, 3, STEPS, FAST), _scaled(words, steps, 7, STEPS, FAST)),
    )
    return tl.reshape(tl.permute(tl.join(pairs, others), (0, 2, 3, 4, 1)), (words.shape[0], _RUN))


@triton.jit
def _scaled(words, steps, PLACE: tl.constexpr, STEPS: tl.constexpr, FAST: tl.constexpr):
    return scaled_four_bits(words, steps, PLACE, PLACE // 4, STEPS, FAST)


@triton.jit
def _times_eight_bits(
    total, words, x, item, begin, k, PRECISION: tl.constexpr, FAST: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Add a tile of the weight times its part of x: at once, or one position of the words after another."""
    if IS_WHOLE:
        columns: tl.constexpr = words.shape[1] * 4
        given = _given(x, item, begin + tl.arange(0, columns), k)
        total += dot(_wide_eight_bits(words, columns, FAST).to(given.dtype), given, PRECISION)
    else:
        word = tl.arange(0, words.shape[1])
        for place in tl.static_range(4):
            given = _given(x, item, begin + word // EIGHTS * _RUN + place * EIGHTS + word % EIGHTS, k)
            total += dot(from_eight_bits(words, place, FAST).to(given.dtype), given, PRECISION)
    return total


@triton.jit
def _times_four_bits(
    total, words, steps, x, item, begin, k,
    PRECISION: tl.constexpr, STEPS: tl.constexpr, FAST: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The same for 4 bits. One position at a time, sums are scaled instead of weights: there are fewer of them. The sum
    of x is computed as a product with ones, so that it has the same layout as the other sums."""
    if IS_WHOLE:
        given = _given(x, item, begin + tl.arange(0, _RUN), k)
        total += dot(_wide_four_bits(words, steps, STEPS, FAST).to(given.dtype), given, PRECISION)
    else:
        ones = tl.full(words.shape, 1.0, x.dtype.element_ty)
        for group in tl.static_range(2):
            made = tl.zeros(total.shape, tl.float32)
            whole = tl.zeros(total.shape, tl.float32)
            for place in tl.static_range(4):
                given = _given(x, item, tl.arange(0, FOURS) + begin + (group * 4 + place) * FOURS, k)
                made += dot(from_four_bits(words, group * 4 + place, FAST).to(given.dtype), given, PRECISION)
                whole += dot(ones, given, PRECISION)
            scale = step_of(steps, 2 * group, STEPS)
            total += made * scale + whole * (step_of(steps, 2 * group + 1, STEPS) - OFFSET * scale)
    return total


@triton.jit
def _in_order(sums, tile, num_parts, ROWS: tl.constexpr, M: tl.constexpr):
    """Add the partial sums of a tile in order. Other programs wrote them just now, so the loads bypass the L1 cache."""
    at = tl.arange(0, ROWS)[:, None] * M + tl.arange(0, M)[None, :]
    total = tl.zeros((ROWS, M), tl.float32)
    for part in range(num_parts):
        total += tl.load(sums + (tile * num_parts + part) * (ROWS * M) + at, cache_modifier=".cg")
    return total


@triton.jit
def _leave(sums, tile, part, num_parts, total, ROWS: tl.constexpr, M: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(sums + (tile * num_parts + part) * (ROWS * M) + at, total)


@triton.jit
def _finish(
    total, other, scales, bias, out, row, item, m, n,
    CODES: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Apply scale, bias and gate to the sums, and store them."""
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
        # Round where the definition rounds.
        gate = activate(made.to(tl.float32), ACTIVATION).to(made.dtype).to(tl.float32)
        made = (gate * other.to(made.dtype).to(tl.float32)).to(made.dtype)
    tl.store(out + item[None, :] * n + row[:, None], made, mask=(item < m)[None, :] & is_row[:, None])


@triton.jit(do_not_specialize=["m"])
def _few_rows_linear(
    x, weight, scales, bias, out, sums, counters, m, n, k, stride,
    CODES: tl.constexpr, STEPS: tl.constexpr, FAST: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    # Tiles of x vary fastest, so that programs that read the same part of the weight run at the same time.
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Past the last row, read the last row again; it is not stored.
    there = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    here = weight + there * stride
    under = weight + (there + n) * stride
    first, end = 0, k
    if IS_SPLIT:
        each = tl.cdiv(tl.cdiv(k, COLUMNS), tl.num_programs(2)) * COLUMNS
        first = tl.program_id(2) * each
        end = tl.minimum(first + each, k)
    if AHEAD > 0:
        word = first // (4 if CODES == "fp8" else (8 if CODES == "int4" else 1))
        prefetch_rows(here + word, stride - word, AHEAD)
        if ACTIVATION != "":
            prefetch_rows(under + word, stride - word, AHEAD)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    item = tl.program_id(0) * M + tl.arange(0, M)
    # Clamp, as with rows: a mask would be computed for every element of x that a thread loads.
    read = tl.minimum(item, m - 1)
    total = tl.zeros((ROWS, M), tl.float32)
    other = tl.zeros((ROWS, M), tl.float32)
    for begin in tl.range(first, end, COLUMNS, num_stages=STAGES):
        if CODES == "fp8":
            column = begin // 4 + tl.arange(0, COLUMNS // 4)[None, :]
            words = tl.load(here + column, eviction_policy="evict_first")
            total = _times_eight_bits(total, words, x, read, begin, k, PRECISION, FAST, IS_WHOLE)
            if ACTIVATION != "":
                words = tl.load(under + column, eviction_policy="evict_first")
                other = _times_eight_bits(other, words, x, read, begin, k, PRECISION, FAST, IS_WHOLE)
        elif CODES == "int4":
            column, run = begin // 8 + tl.arange(0, FOURS)[None, :], begin // _RUN
            words = tl.load(here + column, eviction_policy="evict_first")
            steps = tl.load(scales + there * (stride // FOURS) + run)
            total = _times_four_bits(total, words, steps, x, read, begin, k, PRECISION, STEPS, FAST, IS_WHOLE)
            if ACTIVATION != "":
                words = tl.load(under + column, eviction_policy="evict_first")
                steps = tl.load(scales + (there + n) * (stride // FOURS) + run)
                other = _times_four_bits(other, words, steps, x, read, begin, k, PRECISION, STEPS, FAST, IS_WHOLE)
        else:
            at = begin + tl.arange(0, COLUMNS)
            tile = tl.load(here + at[None, :], eviction_policy="evict_first")
            given = _given(x, read, at, k)
            total += dot(tile, given, PRECISION)
            if ACTIVATION != "":
                other += dot(tl.load(under + at[None, :], eviction_policy="evict_first"), given, PRECISION)
    if IS_SPLIT:
        number, parts = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.num_programs(2)
        beneath = sums + tl.num_programs(0) * tl.num_programs(1) * parts * (ROWS * M)
        _leave(sums, number, tl.program_id(2), parts, total, ROWS, M)
        if ACTIVATION != "":
            _leave(beneath, number, tl.program_id(2), parts, other, ROWS, M)
        tl.debug_barrier()  # All sums must be stored before this part is counted.
        if tl.atomic_add(counters + number, 1) == parts - 1:
            total = _in_order(sums, number, parts, ROWS, M)
            if ACTIVATION != "":
                other = _in_order(beneath, number, parts, ROWS, M)
            _finish(total, other, scales, bias, out, row, item, m, n, CODES, HAS_BIAS, ACTIVATION)
            tl.store(counters + number, 0)  # For the next launch, which runs after this one.
    else:
        _finish(total, other, scales, bias, out, row, item, m, n, CODES, HAS_BIAS, ACTIVATION)


def forward(x: Tensor, weight: Tensor | NarrowWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """See `few_rows_linear`."""
    (m, k), num_rows = x.shape, weight.shape[0]
    n = num_rows if activation is None else num_rows // 2
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    is_narrow = isinstance(weight, NarrowWeight)
    rows_of_x = min(max(FEWEST, triton.next_power_of_2(m)), MOST)
    codes, tile = (weight.codes if is_narrow else weight), _tile_for(weight, k, rows_of_x, activation is not None)
    columns = tile.columns
    while k % columns:
        columns //= 2
    grid = (triton.cdiv(m, rows_of_x), triton.cdiv(n, tile.rows))
    parts = count_column_parts(grid[0] * grid[1], k // columns, tile.programs * num_processors(x.device))
    sums = counters = None
    if parts > 1:
        size = grid[0] * grid[1] * parts * tile.rows * rows_of_x * (1 if activation is None else 2)
        sums, counters = torch.empty(size, dtype=torch.float32, device=x.device), counters_of(x.device)
    launch(
        _few_rows_linear, (*grid, parts),
        x, codes, scales_of(weight) if is_narrow else None, bias, out, sums, counters, m, n, k, codes.shape[1],
        CODES=weight.kind if is_narrow else "", STEPS=steps_of(weight) if is_narrow else "",
        FAST=is_narrow and is_fast(weight), IS_WHOLE=is_narrow and tile.is_whole, HAS_BIAS=bias is not None,
        ACTIVATION=activation or "", M=rows_of_x, ROWS=tile.rows, COLUMNS=columns, STAGES=tile.stages,
        IS_SPLIT=parts > 1, AHEAD=AHEAD if is_on_gpu(x) else 0,
        PRECISION=precision_of(x.dtype), num_warps=tile.warps, **overlapping(x.device),
    )  # fmt: skip
    return out


def count_column_parts(num_tiles: int, num_columns: int, wanted: int) -> int:
    """Return how many programs split the columns of a tile, where `wanted` programs are wanted in all."""
    if num_tiles > MOST_COUNTED:
        return 1
    parts = max(min(wanted // num_tiles, num_columns // FEWEST_TILES), 1)
    return triton.cdiv(num_columns, triton.cdiv(num_columns, parts))  # No part is empty.


@cache
def counters_of(device: torch.device) -> Tensor:
    """Return zeros, which every launch leaves as zeros: kernels of a device run one after another. A kernel runs once
    before its graph is captured, so these are never allocated from a graph's memory pool."""
    return torch.zeros(MOST_COUNTED, dtype=torch.int32, device=device)


def _tile_for(weight: Tensor | NarrowWeight, k: int, rows_of_x: int, has_gate: bool) -> Tile:
    if isinstance(weight, NarrowWeight):
        return NARROW_TILES[weight.kind, has_gate][rows_of_x]
    if has_gate:
        return GATED if rows_of_x <= FEW else GATED_MORE
    if k < MANY_COLUMNS:
        return NARROW
    return WIDE if rows_of_x <= FEW else WIDE_MORE
