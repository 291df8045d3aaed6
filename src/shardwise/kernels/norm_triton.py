"""The kernels of `norm.py`."""

# mypy: ignore-errors
# ruff: noqa: N803, ARG001

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from shardwise.kernels.launch import launch, num_processors, overlapping, rows_of

#: Elements that a program holds at once, if rows are short; elements per warp; and pipeline stages of the backward's
#: rows. `benchmarks/kernels.py --sweep` tries others.
TILE, A_WARP, STAGES = 2048, 512, 3
#: Registers of a multiprocessor, and registers per element of the tile of a backward program; one more for the gradient
#: of a residual, and one for that of a bias. This is two more than it needs: fewer programs with three rows in flight
#: were faster than more with two (60 us and 80 us for 16384 x 2048 on an H200).
REGISTERS, A_NUMBER = 65_536, 7
#: Partial sums, and columns of them, that are added up at a time.
SUMS, COLUMNS = 256, 16
#: With up to this many rows, a norm of a decode step is little more than its prologue and epilogue, which overlap with
#: those of the kernels next to it.
FEW_ROWS = 256


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, residual, weight, bias, normed, new, means, rstds, x_stride, residual_stride, rows, n, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, IS_LAYER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_column = column < n
    mask = (row < rows)[:, None] & is_column[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    out = row[:, None] * n + column[None, :]
    if HAS_RESIDUAL:
        value += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        rounded = value.to(new.dtype.element_ty)
        tl.store(new + out, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if IS_LAYER:
        mean = tl.sum(value, 1) / n
        tl.store(means + row, mean, mask=row < rows)
        value = tl.where(mask, value - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, 1) / n + eps)
    tl.store(rstds + row, rstd, mask=row < rows)
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    value = value * rstd[:, None] * w[None, :]
    if HAS_BIAS:
        value += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(normed + out, value.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    d_normed, d_new, new, weight, means, rstds, dx, dw, db, d_normed_stride, d_new_stride, new_stride, rows, n,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, IS_LAYER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    is_column = column < n
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    w_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    b_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & is_column[None, :]
        value = tl.load(new + row[:, None] * new_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(d_normed + row[:, None] * d_normed_stride + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        if HAS_RESIDUAL:
            passed = tl.load(d_new + row[:, None] * d_new_stride + column[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstds + row, mask=row < rows, other=0.0)
        if IS_LAYER:
            mean = tl.load(means + row, mask=row < rows, other=0.0)
            value = tl.where(mask, value - mean[:, None], 0.0)
        unit = value * rstd[:, None]
        w_sum += gradient * unit
        if HAS_BIAS:
            b_sum += gradient
        weighted = gradient * w[None, :]
        found = weighted - unit * (tl.sum(unit * weighted, 1) / n)[:, None]
        if IS_LAYER:
            found -= (tl.sum(weighted, 1) / n)[:, None]
        found *= rstd[:, None]
        if HAS_RESIDUAL:
            found += passed.to(tl.float32)
        tl.store(dx + row[:, None] * n + column[None, :], found.to(dx.dtype.element_ty), mask=mask)
    tl.store(dw + program * n + column, tl.sum(w_sum, 0), mask=is_column)
    if HAS_BIAS:
        tl.store(db + program * n + column, tl.sum(b_sum, 0), mask=is_column)


@triton.jit
def _add_up(sums, dw, db, programs, n, SUMS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    total = tl.zeros((SUMS, COLUMNS), tl.float32)
    for begin in range(0, programs, SUMS):
        program = begin + tl.arange(0, SUMS)
        mask = (program < programs)[:, None] & (column < n)[None, :]
        total += tl.load(sums + (part * programs + program)[:, None] * n + column[None, :], mask=mask, other=0.0)
    found = tl.sum(total, 0).to(dw.dtype.element_ty)
    if part == 0:
        tl.store(dw + column, found, mask=column < n)
    else:
        tl.store(db + column, found, mask=column < n)


def _tile(n: int) -> dict[str, int]:
    block = triton.next_power_of_2(max(n, 1))
    num_rows = max(1, TILE // block)
    return {"ROWS": num_rows, "BLOCK": block, "num_warps": min(16, max(1, num_rows * block // A_WARP))}


def _num_programs(device: torch.device, tile: dict[str, int], num_more: int) -> int:
    """Return how many programs fit on the GPU at once. Each processes one tile after another; a program that had to
    wait for another to end would begin when all should be over."""
    registers = tile["ROWS"] * tile["BLOCK"] * (A_NUMBER + num_more)
    return num_processors(device) * max(1, REGISTERS // registers)


@custom_op("shardwise::norm_forward", mutates_args=())
def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, is_layer: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return launch_norm(x, residual, weight, bias, eps, is_layer)


def launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, is_layer: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm, the new residual (empty without an old one), and each row's mean (layer norm) and rstd."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = rows_of(x)
    rows, n = x.shape
    new = torch.empty_like(normed) if residual is not None else normed.new_empty(0)
    residual = None if residual is None else rows_of(residual)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if x.numel():
        tile = _tile(n)
        is_decode = rows <= FEW_ROWS and torch.is_inference_mode_enabled()
        launch(
            _forward, (triton.cdiv(rows, tile["ROWS"]),),
            x, residual, weight.contiguous(), None if bias is None else bias.contiguous(), normed, new, mean, rstd,
            x.stride(0), 0 if residual is None else residual.stride(0), rows, n, eps,
            HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None, IS_LAYER=is_layer, **tile,
            **(overlapping(x.device) if is_decode else {"OVERLAPS": False}),
        )  # fmt: skip
    return normed, new, mean, rstd


@norm_forward.register_fake
def _(x, residual, weight, bias, eps, is_layer):
    normed = x.new_empty(x.shape)
    rows = x.numel() // max(x.shape[-1], 1)
    new = x.new_empty(x.shape) if residual is not None else x.new_empty(0)
    return normed, new, x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


@custom_op("shardwise::norm_backward", mutates_args=())
def norm_backward(
    d_normed: Tensor,
    d_new: Tensor | None,
    new: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    is_layer: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, the weight and the bias (empty without one)."""
    dx = torch.empty(new.shape, dtype=new.dtype, device=new.device)
    new, d_normed = rows_of(new), rows_of(d_normed)
    d_new = None if d_new is None else rows_of(d_new)
    rows, n = new.shape
    if not new.numel():
        return dx, torch.zeros_like(weight), torch.zeros_like(weight) if has_bias else weight.new_empty(0)
    tile = _tile(n)
    programs = min(triton.cdiv(rows, tile["ROWS"]), _num_programs(new.device, tile, (d_new is not None) + has_bias))
    sums = torch.empty((1 + has_bias, programs, n), dtype=torch.float32, device=new.device)
    dw, db = torch.empty_like(weight), weight.new_empty(n if has_bias else 0)
    _backward[(programs,)](
        d_normed, d_new, new, weight.contiguous(), mean, rstd, dx, sums[0], sums[-1],
        *(0 if each is None else each.stride(0) for each in (d_normed, d_new, new)), rows, n,
        HAS_RESIDUAL=d_new is not None, HAS_BIAS=has_bias, IS_LAYER=is_layer, STAGES=STAGES, **tile,
    )  # fmt: skip
    _add_up[(triton.cdiv(n, COLUMNS), 1 + has_bias)](sums, dw, db, programs, n, SUMS=SUMS, COLUMNS=COLUMNS)
    return dx, dw, db


@norm_backward.register_fake
def _(d_normed, d_new, new, weight, mean, rstd, is_layer, has_bias):
    dw = weight.new_empty(weight.shape)
    return new.new_empty(new.shape), dw, weight.new_empty(weight.shape) if has_bias else weight.new_empty(0)
