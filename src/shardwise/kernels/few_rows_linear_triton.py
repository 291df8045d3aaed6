"""The program of `few_rows_linear.py`: some rows of the weight a program, all rows of x."""

# mypy: ignore-errors
# ruff: noqa: N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.device_functions import LINE, activate, dot, precision_of, prefetch
from shardwise.kernels.launch import overlapping


class Tile(NamedTuple):
    """Rows and columns of the weight that a program has at a time, how many tiles are on their way, and warps."""

    rows: int
    columns: int
    stages: int
    warps: int


#: Without a gate, of weights with narrow and with wide rows, and with one, whose program has two tiles at a time; and
#: how many columns are fetched into the cache while the kernel before ends. `benchmarks/serving.py --cases rows` tries
#: others.
NARROW, WIDE, GATED, AHEAD = Tile(64, 128, 6, 4), Tile(32, 256, 6, 2), Tile(64, 64, 5, 4), 512
#: From so many columns on rows are wide: then programs of fewer of them have enough on its way, and there are more.
MANY_COLUMNS = 4096
#: The fewest columns of a tile of x, as tensor cores ask.
FEWEST = 16


@triton.jit
def _few_rows_linear(
    x, weight, bias, out, m, n, k,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Beyond the last row the last is read again, and not written.
    there = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    here = weight + there * k
    under = weight + (there + n) * k
    if AHEAD > 0:
        line = tl.minimum(tl.arange(0, AHEAD // LINE) * LINE, k - 1)
        prefetch(here + line[None, :])
        if ACTIVATION != "":
            prefetch(under + line[None, :])
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    item = tl.arange(0, M)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, M), tl.float32)
    other = tl.zeros((ROWS, M), tl.float32)
    for begin in tl.range(0, k, COLUMNS, num_stages=STAGES):
        at = begin + column
        tile = tl.load(here + at[None, :], eviction_policy="evict_first")
        given = tl.load(x + item[None, :] * k + at[:, None], mask=(item < m)[None, :], other=0.0)
        total += dot(tile, given, PRECISION)
        if ACTIVATION != "":
            beneath = tl.load(under + at[None, :], eviction_policy="evict_first")
            other += dot(beneath, given, PRECISION)
    is_row = row < n
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


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """See `few_rows_linear`."""
    m, k = x.shape
    n = len(weight) if activation is None else len(weight) // 2
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tile = GATED if activation is not None else WIDE if k >= MANY_COLUMNS else NARROW
    columns = tile.columns
    while k % columns:
        columns //= 2
    _few_rows_linear[(triton.cdiv(n, tile.rows),)](
        x, weight, bias, out, m, n, k,
        HAS_BIAS=bias is not None, ACTIVATION=activation or "", M=max(FEWEST, triton.next_power_of_2(m)),
        ROWS=tile.rows, COLUMNS=columns, STAGES=tile.stages, AHEAD=AHEAD if x.is_cuda else 0,
        PRECISION=precision_of(x.dtype), num_warps=tile.warps, **overlapping(x.device),
    )  # fmt: skip
    return out
