"""The kernels of `fp8.py`: the largest magnitude of a tensor, and casts that write rows and columns at once."""

# mypy: ignore-errors
# ruff: noqa: N803, ARG001

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.choose import is_interpreted
from shardwise.kernels.launch import num_processors, rows_of

#: Elements per iteration of a program, programs per multiprocessor, and warps.
BLOCK, PROGRAMS, WARPS = 4096, 8, 8
#: Rows and columns of a tile that a program casts.
TILE = 64
#: The same as in `fp8.py`, because a kernel cannot read the names of another file.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_KIND = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_LEAST = 2.0**-100
_MULTIPLE = 16


@triton.jit
def _narrow(number, KIND: tl.constexpr, ROUNDS: tl.constexpr):
    """Cast to fp8. Triton's interpreter does not carry when it rounds up to a power of 2, so round first there."""
    if ROUNDS:
        less: tl.constexpr = 20 if KIND == tl.float8e4nv else 21  # noqa: SIM300
        bits = number.to(tl.int32, bitcast=True)
        bits = bits + ((bits >> less) & 1) + ((1 << (less - 1)) - 1)
        number = ((bits >> less) << less).to(tl.float32, bitcast=True)
    return number.to(KIND)


@triton.jit
def _find_largest(x, found, rows, n, stride, BLOCK: tl.constexpr):
    """Find the largest bits of a magnitude: those of NaN are above those of infinity."""
    blocks = tl.cdiv(n, BLOCK)
    most = tl.zeros((BLOCK,), tl.int32)
    for place in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = (place // blocks).to(tl.int64)
        column = (place % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        number = tl.load(x + row * stride + column, mask=column < n, other=0.0).to(tl.float32)
        most = tl.maximum(most, number.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(found, tl.max(most, 0))


@triton.jit
def _cast_tile(
    x, bits, scale, by_rows, by_columns, rows, n, stride, long_rows,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, FINDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KIND: tl.constexpr, ROUNDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n, TILE)
    row = (tl.program_id(0) // across).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    if FINDS:
        most = tl.load(bits).to(tl.float32, bitcast=True)
        # Comparisons with NaN are false, so NaN stays.
        factor = tl.div_rn(tl.where(most < LEAST, LEAST, most), LARGEST)
        if tl.program_id(0) == 0:
            tl.store(scale, factor)
    else:
        factor = tl.load(scale)
    inverse = tl.div_rn(1.0, factor)
    mask = (row[:, None] < rows) & (column[None, :] < n)
    number = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    number = number * inverse
    made = _narrow(number, KIND, ROUNDS)
    if ROWS:
        tl.store(by_rows + row[:, None] * n + column[None, :], made, mask=mask)
    if COLUMNS:
        turned = tl.trans(made.to(tl.int8, bitcast=True)).to(KIND, bitcast=True)
        long = (column[:, None] < n) & (row[None, :] < long_rows)
        tl.store(by_columns + column[:, None] * long_rows + row[None, :], turned, mask=long)


@triton.jit
def _cast_rows(
    x, out, scale, rows, n, row_stride, column_stride, long,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, ROUNDS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Cast each row with a scale of its own, in two reads. With its strides exchanged, a matrix is cast by columns."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    most = tl.zeros((HEIGHT, WIDTH), tl.int32)
    for start in range(0, n, WIDTH):
        column = start + tl.arange(0, WIDTH).to(tl.int64)
        mask = (row[:, None] < rows) & (column[None, :] < n)
        number = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=mask, other=0.0)
        most = tl.maximum(most, number.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(most, 1).to(tl.float32, bitcast=True)
    factor = tl.div_rn(tl.where(largest < LEAST, LEAST, largest), LARGEST)
    tl.store(scale + row, factor, mask=row < rows)
    inverse = tl.div_rn(1.0, factor)
    for start in range(0, long, WIDTH):
        column = start + tl.arange(0, WIDTH).to(tl.int64)
        mask = (row[:, None] < rows) & (column[None, :] < n)
        number = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=mask, other=0.0)
        made = _narrow(number.to(tl.float32) * inverse[:, None], out.dtype.element_ty, ROUNDS)
        reached = (row[:, None] < rows) & (column[None, :] < long)
        tl.store(out + row[:, None] * long + column[None, :], made, mask=reached)


def by_tensor(
    x: Tensor, kind: torch.dtype, rows: bool, columns: bool, scale: Tensor | None
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """Cast rows and columns of a matrix, each with the scale of the tensor."""
    x = rows_of(x)
    height, width = x.shape
    long = height + -height % _MULTIPLE
    finds = scale is None
    bits = torch.zeros((), dtype=torch.int32, device=x.device) if finds else None
    scale = torch.empty((), device=x.device) if scale is None else scale
    if finds:
        shape = (1, x.numel(), x.numel()) if x.is_contiguous() else (height, width, x.stride(0))
        programs = min(shape[0] * triton.cdiv(shape[1], BLOCK), PROGRAMS * num_processors(x.device))
        _find_largest[(programs,)](x, bits, *shape, BLOCK=BLOCK, num_warps=WARPS)
    by_rows = torch.empty((height, width), dtype=kind, device=x.device) if rows else None
    # For float32, Triton 3.6 (H200) transposes every fourth row wrongly: then torch transposes the bytes.
    turned = columns and x.dtype is torch.float32
    by_columns = torch.empty((width, long), dtype=kind, device=x.device) if columns and not turned else None
    if turned and by_rows is None:
        by_rows = torch.empty((height, width), dtype=kind, device=x.device)
    reaches = height if by_columns is None else long
    _cast_tile[(triton.cdiv(reaches, TILE) * triton.cdiv(width, TILE),)](
        x, bits, scale, by_rows, by_columns, height, width, x.stride(0), long,
        LARGEST=_LARGEST[kind], LEAST=_LEAST, FINDS=finds, ROWS=by_rows is not None, COLUMNS=by_columns is not None,
        KIND=_KIND[kind], ROUNDS=is_interpreted(), TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    if turned:
        by_columns = _turned(by_rows, long)
    return (by_rows, scale) if rows else None, None if by_columns is None else (by_columns, scale)


def _turned(by_rows: Tensor, long: int) -> Tensor:
    """Transpose, padding rows with zeros."""
    height, width = by_rows.shape
    made = torch.zeros((width, long), dtype=torch.uint8, device=by_rows.device)
    made[:, :height] = by_rows.view(torch.uint8).t()
    return made.view(by_rows.dtype)


def by_row(
    x: Tensor, kind: torch.dtype, rows: bool, columns: bool, scale: Tensor | None
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """Cast rows and columns of a matrix, each with a scale of its own."""
    x = rows_of(x)
    height, width = x.shape
    made = _each_row(x, kind, height, width, x.stride(0), 1, width, (8, 256)) if rows else None
    # Columns: neighbours in memory belong to different rows here, so a program takes many rows.
    long = height + -height % _MULTIPLE
    turned = _each_row(x, kind, width, height, 1, x.stride(0), long, (32, 64)) if columns else None
    return made, turned


def _each_row(
    x: Tensor, kind: torch.dtype, rows: int, n: int, row_stride: int, column_stride: int, long: int,
    tile: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.empty((rows, long), dtype=kind, device=x.device)
    scale = torch.empty((rows, 1), device=x.device)
    _cast_rows[(triton.cdiv(rows, tile[0]),)](
        x, out, scale, rows, n, row_stride, column_stride, long,
        LARGEST=_LARGEST[kind], LEAST=_LEAST, ROUNDS=is_interpreted(), HEIGHT=tile[0], WIDTH=tile[1], num_warps=WARPS,
    )  # fmt: skip
    return out, scale
