"""The program of `widen.py`, and how programs of products read 4 bits."""

# mypy: ignore-errors
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.narrow import GROUP, PAIR, NarrowWeight

#: Rows and columns that a program makes wide.
ROWS, COLUMNS, WARPS = 16, 512, 4
_GROUP, _PAIR = tl.constexpr(GROUP), tl.constexpr(PAIR)


@triton.jit
def _half(bits, PLACE: tl.constexpr):
    """One of the four numbers of 16 bits that lie in 64."""
    return ((bits >> (16 * PLACE)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def low_bits(byte, steps):
    """Weights of the first group of a pair; `steps` has the scales and lowest values of both in 64 bits."""
    return (byte & 15).to(tl.float32) * _half(steps, 0) + _half(steps, 1)


@triton.jit
def high_bits(byte, steps):
    return (byte >> 4).to(tl.float32) * _half(steps, 2) + _half(steps, 3)


@triton.jit
def _widen(
    codes, scales, out, num_rows, k, stride,
    CODES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * COLUMNS
    is_row = (row < num_rows)[:, None]
    there = row.to(tl.int64)[:, None]
    if CODES == "fp8":
        at = begin + tl.arange(0, COLUMNS)[None, :]
        mask = is_row & (at < k)
        made = tl.load(codes + there * stride + at, mask=mask, other=0.0).to(tl.float32)
        made = made * tl.load(scales + there, mask=is_row, other=0.0)
        tl.store(out + there * k + at, made.to(out.dtype.element_ty), mask=mask)
    else:
        inside = tl.arange(0, _GROUP)[None, :]
        for first in tl.static_range(0, COLUMNS, _PAIR):
            # Beyond the last pair the last is read again, and not written.
            pair = tl.minimum((begin + first) // _PAIR, stride // _GROUP - 1)
            byte = tl.load(codes + there * stride + pair * _GROUP + inside, mask=is_row, other=0)
            steps = tl.load(scales + there * (stride // _GROUP) + pair, mask=is_row, other=0)
            at = begin + first + inside
            here = out + there * k + at
            tl.store(here, low_bits(byte, steps).to(out.dtype.element_ty), mask=is_row & (at < k))
            tl.store(here + _GROUP, high_bits(byte, steps).to(out.dtype.element_ty), mask=is_row & (at + _GROUP < k))


def scales_of(weight: NarrowWeight) -> Tensor:
    """As programs read them: in 4 bits those of a pair of groups are one number of 64 bits."""
    return weight.scales if weight.kind == "fp8" else weight.scales.flatten().view(torch.int64)


def forward(weight: NarrowWeight) -> Tensor:
    """See `widen`."""
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.codes.device)
    stride, k = weight.codes.shape[-1], weight.inputs
    num_rows = out.numel() // k
    _widen[(triton.cdiv(num_rows, ROWS), triton.cdiv(k, COLUMNS))](
        weight.codes, scales_of(weight), out, num_rows, k, stride,
        CODES=weight.kind, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return out
