"""The kernel of `widen.py`, and how kernels of products read packed codes (`narrow.py`).

A GPU's own conversions (of e4m3 to bfloat16, of integers) are slower than its memory. So products in bfloat16 move the
bits of a code to their position in the number, for two words at a time (`FAST`):

    e4m3      s eeee mmm      ->  s 0000eeee mmm0000, times 2^120: the difference of the exponent biases
    4 bits    nnnn            ->  0 10000110 000nnnn, which is 128 + n

The one-row kernel multiplies in float32, where shifting a word does the same. The remaining factor of the exponent
biases, and the excess of 128, are corrected in the sums.
"""

# mypy: ignore-errors
# ruff: noqa: N803, RET505

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.launch import is_on_gpu, launch
from shardwise.kernels.narrow import RUN, NarrowWeight

#: Rows and columns that a program dequantises, and its warps.
ROWS, COLUMNS, WARPS = 16, 512, 4
_RUN = tl.constexpr(RUN)
#: Words of a run: in fp8, in 4 bits.
EIGHTS, FOURS = tl.constexpr(RUN // 4), tl.constexpr(RUN // 8)
#: The excess of 4-bit numbers as `from_four_bits` and `four_bits_shifted` return them.
OFFSET = tl.constexpr(128.0)
#: Half of the difference between the exponent biases of e4m3 and float32, as a factor: one half is applied to the
#: input, so that neither factor is too large.
HALF_SHIFT = tl.constexpr(2.0**60)


def _from_byte(place: int) -> str:
    """PTX: one byte of each of two words as bfloat16. The lower byte that is selected with it is masked off."""
    return f"""{{
        .reg .b32 a, s;
        prmt.b32 a, $1, $2, 0x{4 + place}0{place}0;
        and.b32 s, a, 0x80008000;
        shr.u32 a, a, 4;
        lop3.b32 a, a, 0x07f007f0, s, 0xea;
        mov.b32 s, 0x7b807b80;
        mul.bf16x2 $0, a, s;
        }}"""


def _from_four_bits(place: int, scale: str = "mov.b32 $0, a;") -> str:
    """PTX: the same for 4 bits. The low half of a byte is in position already."""
    shift = "shr.u32 a, a, 4;" if place % 2 else ""
    return f"""{{
        .reg .b32 a, s;
        prmt.b32 a, $1, $2, 0x0{4 + place // 2}0{place // 2};
        {shift}
        lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
        {scale}
        }}"""


def _scaled_four_bits(place: int) -> str:
    """PTX: the same without the excess, times a scale plus a lowest value, each given for both words."""
    return _from_four_bits(place, "mov.b32 s, 0xc300c300; add.rn.bf16x2 a, a, s; fma.rn.bf16x2 $0, a, $3, $5;")


_BYTES = tl.constexpr(tuple(map(_from_byte, range(4))))
_SCALED_FOUR_BITS = tl.constexpr(tuple(map(_scaled_four_bits, range(8))))
_FOUR_BITS = tl.constexpr(tuple(map(_from_four_bits, range(8))))


@triton.jit
def from_eight_bits(words, PLACE: tl.constexpr, FAST: tl.constexpr):
    """Return a byte of words: as bfloat16, which represents every e4m3, or unchanged. NaN is left to the scale."""
    if FAST:
        return tl.inline_asm_elementwise(
            _BYTES[PLACE], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return (words >> (8 * PLACE)).to(tl.int8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def from_four_bits(words, PLACE: tl.constexpr, FAST: tl.constexpr):
    """Return 4 bits of words, 128 too large: as bfloat16, or as float32."""
    if FAST:
        return tl.inline_asm_elementwise(
            _FOUR_BITS[PLACE], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return four_bits_shifted(words, PLACE)


@triton.jit
def eight_bits_shifted(words, PLACE: tl.constexpr):
    """Return a byte of words as float32, too small by `HALF_SHIFT` twice. The extended sign bits are masked off."""
    return (((words << (24 - 8 * PLACE)) >> 4) & -0x78100000).to(tl.float32, bitcast=True)


@triton.jit
def four_bits_shifted(words, PLACE: tl.constexpr):
    """Return 4 bits of words as float32, too large by `OFFSET`."""
    there = words << (16 - 4 * PLACE) if PLACE < 4 else words >> (4 * PLACE - 16)
    return ((there & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def step_of(bits, PLACE: tl.constexpr, STEPS: tl.constexpr):
    """Return one of the four 16-bit numbers in 64 bits: scale and lowest value of a group, and of the next."""
    if STEPS == "bf16":
        return (((bits >> (16 * PLACE)) & 0xFFFF) << 16).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return ((bits >> (16 * PLACE)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _twice(bits, PLACE: tl.constexpr):
    """Return one of these four, twice in one word."""
    one = ((bits >> (16 * PLACE)) & 0xFFFF).to(tl.int32)
    return one | (one << 16)


@triton.jit
def scaled_four_bits(words, bits, PLACE: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, FAST: tl.constexpr):
    """Return 4 bits of words times the scale of their group, plus its lowest value. A 4-bit times an 8-bit mantissa is
    computed exactly and rounded once, as in the definition."""
    if FAST:
        return tl.inline_asm_elementwise(
            _SCALED_FOUR_BITS[PLACE], "=r,r,r,r,r,r,r",
            [words, _twice(bits, 2 * GROUP), _twice(bits, 2 * GROUP + 1)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        made = four_bits_shifted(words, PLACE) - OFFSET
        return made * step_of(bits, 2 * GROUP, STEPS) + step_of(bits, 2 * GROUP + 1, STEPS)


@triton.jit
def _widen(
    codes, scales, out, num_rows, k, stride,
    CODES: tl.constexpr, STEPS: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * COLUMNS
    is_row = (row < num_rows)[:, None]
    there = row.to(tl.int64)[:, None]
    for first in tl.static_range(0, COLUMNS, _RUN):
        # Past the last run, read the last run again; it is not stored.
        run = tl.minimum((begin + first) // _RUN, stride // (EIGHTS if CODES == "fp8" else FOURS) - 1)
        if CODES == "fp8":
            word = tl.load(codes + there * stride + run * EIGHTS + tl.arange(0, EIGHTS)[None, :], mask=is_row, other=0)
            scale = tl.load(scales + there, mask=is_row, other=0.0)
            for place in tl.static_range(4):
                at = begin + first + place * EIGHTS + tl.arange(0, EIGHTS)[None, :]
                made = from_eight_bits(word, place, FAST).to(tl.float32) * scale
                tl.store(out + there * k + at, made.to(out.dtype.element_ty), mask=is_row & (at < k))
        else:
            word = tl.load(codes + there * stride + run * FOURS + tl.arange(0, FOURS)[None, :], mask=is_row, other=0)
            steps = tl.load(scales + there * (stride // FOURS) + run, mask=is_row, other=0)
            for place in tl.static_range(8):
                at = begin + first + place * FOURS + tl.arange(0, FOURS)[None, :]
                made = scaled_four_bits(word, steps, place, place // 4, STEPS, FAST)
                tl.store(out + there * k + at, made.to(out.dtype.element_ty), mask=is_row & (at < k))


def is_fast(weight: NarrowWeight) -> bool:
    return is_on_gpu(weight.codes) and weight.dtype == torch.bfloat16


def scales_of(weight: NarrowWeight) -> Tensor:
    """Return the scales as kernels read them: in 4 bits, those of a run's two groups as one 64-bit number."""
    return weight.scales if weight.kind == "fp8" else weight.scales.flatten().view(torch.int64)


def steps_of(weight: NarrowWeight) -> str:
    """Return the dtype in which scales and lowest values of 4 bits are stored."""
    return "" if weight.kind == "fp8" else "bf16" if weight.scales.dtype == torch.bfloat16 else "fp16"


def forward(weight: NarrowWeight) -> Tensor:
    """See `widen`."""
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.codes.device)
    stride, k = weight.codes.shape[-1], weight.inputs
    num_rows = out.numel() // k
    launch(
        _widen, (triton.cdiv(num_rows, ROWS), triton.cdiv(k, COLUMNS)),
        weight.codes, scales_of(weight), out, num_rows, k, stride,
        CODES=weight.kind, STEPS=steps_of(weight), FAST=is_fast(weight), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return out
