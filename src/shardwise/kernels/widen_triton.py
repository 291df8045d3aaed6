"""The program of `widen.py`, and how programs of products read codes.

A GPU's own conversions (of e4m3 to bfloat16, of whole numbers) are slower than its memory. So products in bfloat16 put
the bits of a code where those of the number lie, four codes at a time (`FAST`):

    e4m3      s eeee mmm      ->  s 0000eeee mmm0000, times 2^120: the distance between the exponents
    4 bits    nnnn            ->  0 10000110 000nnnn, which is 128 + n, minus 128
"""

# mypy: ignore-errors
# ruff: noqa: N803, RET505

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.narrow import GROUP, PAIR, NarrowWeight

#: Rows and columns that a program makes wide.
ROWS, COLUMNS, WARPS = 16, 512, 4
_GROUP, _PAIR = tl.constexpr(GROUP), tl.constexpr(PAIR)


@triton.jit
def from_eight_bits(codes, FAST: tl.constexpr):
    """e4m3 as bfloat16, which holds every one of them; or as it is. What is no number is left to the scale."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            and.b32 s, a, 0x80008000;
            shr.u32 a, a, 4;
            lop3.b32 a, a, 0x07f007f0, s, 0xea;
            and.b32 t, b, 0x80008000;
            shr.u32 b, b, 4;
            lop3.b32 b, b, 0x07f007f0, t, 0xea;
            mov.b32 s, 0x7b807b80;
            mul.bf16x2 $0, a, s;
            mul.bf16x2 $1, b, s;
            }""",
            "=r,=r,r", [codes.to(tl.int8, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return codes


@triton.jit
def from_four_bits(codes, HIGH: tl.constexpr, FAST: tl.constexpr):
    """Low or high bits of bytes as numbers from 0 to 15: bfloat16, or float32."""
    if FAST:
        # Shifted by 4 bits or by none, four bytes at once.
        places = tl.full(codes.shape, 4 if HIGH else 0, tl.int8)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            and.b32 b, $3, 0xff;
            shr.u32 c, $2, b;
            and.b32 c, c, 0x0f0f0f0f;
            prmt.b32 a, c, 0x43434343, 0x4140;
            prmt.b32 b, c, 0x43434343, 0x4342;
            mov.b32 c, 0x43004300;
            sub.bf16x2 $0, a, c;
            sub.bf16x2 $1, b, c;
            }""",
            "=r,=r,r,r", [codes, places], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return ((codes >> 4) if HIGH else (codes & 15)).to(tl.float32)


@triton.jit
def half_of(bits, PLACE: tl.constexpr):
    """One of the four numbers of 16 bits that lie in 64: scale and lowest value of a group, and of the next."""
    return ((bits >> (16 * PLACE)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _widen(
    codes, scales, out, num_rows, k, stride,
    CODES: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * COLUMNS
    is_row = (row < num_rows)[:, None]
    there = row.to(tl.int64)[:, None]
    if CODES == "fp8":
        at = begin + tl.arange(0, COLUMNS)[None, :]
        mask = is_row & (at < k)
        made = from_eight_bits(tl.load(codes + there * stride + at, mask=mask, other=0.0), FAST).to(tl.float32)
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
            low = from_four_bits(byte, False, FAST).to(tl.float32) * half_of(steps, 0) + half_of(steps, 1)
            high = from_four_bits(byte, True, FAST).to(tl.float32) * half_of(steps, 2) + half_of(steps, 3)
            tl.store(here, low.to(out.dtype.element_ty), mask=is_row & (at < k))
            tl.store(here + _GROUP, high.to(out.dtype.element_ty), mask=is_row & (at + _GROUP < k))


def is_fast(weight: NarrowWeight) -> bool:
    return weight.codes.is_cuda and weight.dtype == torch.bfloat16


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
        CODES=weight.kind, FAST=is_fast(weight), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return out
