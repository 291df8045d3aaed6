"""The program of `row_linear.py`: some rows of the weight a program."""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.gated_triton import _activate
from shardwise.kernels.launch import num_processors, overlapping

#: Columns of the weight at a time, most rows of a program, how many programs a processor should have, and up to how
#: many rows four warps are enough. `benchmarks/serving.py --cases rows` tries others.
COLUMNS, ROWS, PROGRAMS, FEW_ROWS = 1024, 16, 2, 8


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
    x, weight, bias, residual, norm, out, new, n, k, eps,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < n
    column = tl.arange(0, COLUMNS)
    here = weight + row.to(tl.int64)[:, None] * k + column[None, :]
    under = weight + (row + n).to(tl.int64)[:, None] * k + column[None, :]
    # The weight is asked for before anything else: the rest is done while it comes.
    mask = is_row[:, None] & (column < k)[None, :]
    tile = tl.load(here, mask=mask, other=0.0, eviction_policy="evict_first")
    if ACTIVATION != "":
        beneath = tl.load(under, mask=mask, other=0.0, eviction_policy="evict_first")
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
    for begin in range(0, k, COLUMNS):
        at = begin + column
        value = _normed_piece(x, residual, norm, at, at < k, rstd, HAS_RESIDUAL, HAS_NORM)
        following = begin + COLUMNS
        mask = is_row[:, None] & (following + column < k)[None, :]
        coming = tl.load(here + following, mask=mask, other=0.0, eviction_policy="evict_first")
        total += tl.sum(tile.to(tl.float32) * value[None, :], 1)
        tile = coming
        if ACTIVATION != "":
            coming = tl.load(under + following, mask=mask, other=0.0, eviction_policy="evict_first")
            other += tl.sum(beneath.to(tl.float32) * value[None, :], 1)
            beneath = coming
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
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None, eps: float,
    activation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `row_linear`."""
    num_rows, k = weight.shape
    n = num_rows if activation is None else num_rows // 2
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    new = x if residual is None else torch.empty_like(x)
    wanted = triton.next_power_of_2(triton.cdiv(n, PROGRAMS * num_processors(x.device)) + 1) // 2
    rows = min(ROWS if activation is None else ROWS // 2, max(wanted, 2))
    _row_linear[(triton.cdiv(n, rows),)](
        x, weight, bias, residual, norm, out, new, n, k, eps,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None,
        ACTIVATION=activation or "", ROWS=rows, COLUMNS=min(COLUMNS, triton.next_power_of_2(k)),
        num_warps=4 if rows * (1 if activation is None else 2) <= FEW_ROWS else 8,
        **overlapping(x.device),
    )  # fmt: skip
    return out, new
