"""AdamW with its two moments in 16 or 8 bits: one pass over weights, gradients and states.

    g ──┬── m = b1 m + (1 - b1) g      rounded to nearest      ── stored
        └── v = b2 v + (1 - b2) g g    stochastically rounded  ── stored
                └── w (1 - lr decay) - lr m' / (sqrt v' + eps), with m and v before they are rounded

In 8 bits a moment is one code per number, and for each block of 256 a scale: the number of the largest magnitude
(Dettmers et al. 2022, "8-bit optimizers via block-wise quantization"). Codes stand for the numbers of `code_book`:
seven decades, finer towards the top.

The second moment changes by about a thousandth in a step, less than half of the distance between representable numbers:
rounded to nearest it would never fall. So it is rounded stochastically, in proportion to the distances. The random bits
are a hash of the number and of the step, so that a resumed run, or another plan, rounds the same numbers alike. In 8
bits a nonzero number is never rounded to 0: dividing by eps alone would make the step far too long.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels.choose import takes_kernel

#: Numbers that share a scale in 8 bits.
BLOCK = 256
#: Multipliers of murmur3's finalizer, as int32.
_MIX = (-2048144789, -1028477387)


class AdamWNumbers(NamedTuple):
    """The scalars of an AdamW step. `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class Moments(NamedTuple):
    """Both moments as stored: in bf16 without scales, otherwise as codes."""

    first: Tensor
    second: Tensor
    first_scale: Tensor | None = None
    second_scale: Tensor | None = None


@cache
def code_book(*, signed: bool, device: torch.device) -> Tensor:
    """Return the 256 numbers that codes stand for, sorted: 0, 1, and seven decades below 1 with 1, 2, 4, ... 64 each.

    Signed, each has its negative; unsigned, there are twice as many. A decade's numbers are the midpoints of equal
    parts of it.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, dtype=torch.float64, device="cpu")
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += middles
        if signed:
            found += [-each for each in middles]
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


def make_moments(weight: Tensor, *, bits: int) -> Moments:
    """Make both moments, filled with zeros."""
    if bits == 16:
        zeros = torch.zeros_like(weight, dtype=torch.bfloat16)
        return Moments(zeros, zeros.clone())
    return Moments(
        *(encode(torch.zeros_like(weight, dtype=torch.float32), signed=signed)[0] for signed in (True, False)),
        *(torch.zeros(_num_blocks(weight), device=weight.device) for _ in range(2)),
    )


def decode(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Return the numbers in float32."""
    numbers = code_book(signed=signed, device=codes.device)[codes.reshape(-1).int()]
    scales = scale.repeat_interleave(BLOCK)[: codes.numel()]
    return (numbers * scales).view(codes.shape)


def encode(numbers: Tensor, *, signed: bool, step: int = 0) -> tuple[Tensor, Tensor]:
    """Return codes of float32 numbers, and the number of the largest magnitude in each block as its scale.

    Signed numbers get the nearest code, unsigned ones are rounded stochastically.
    """
    flat = numbers.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    # The scale keeps its sign, because 1 is in the book and -1 is not.
    highest, lowest = padded.amax(1), padded.amin(1)
    scale = torch.where(highest >= -lowest, highest, lowest)
    shares = padded / torch.where(scale == 0, 1.0, scale)[:, None]
    book = code_book(signed=signed, device=numbers.device)
    # NaN has no order: it gets the lowest code, and its block's scale is NaN.
    shares = torch.where(shares.isnan(), book[0], shares)
    below = (torch.searchsorted(book, shares, right=True) - 1).clamp(0, len(book) - 2)
    low, high = book[below], book[below + 1]
    if signed:
        codes = below + (shares - low > high - shares)
    else:
        codes = below + (_chance(padded, step) * (high - low) < shares - low)
        codes = torch.where((shares > 0) & (codes == 0), 1, codes)
    return codes.to(torch.uint8).view(-1)[: len(flat)].view(numbers.shape), scale


def round_by_chance(numbers: Tensor, step: int) -> Tensor:
    """Round float32 numbers to bf16 stochastically: up or down, in proportion to the distances."""
    bits = numbers.view(torch.int32)
    raised = bits + (_hash(bits, step) & 0xFFFF)
    return torch.where(numbers.isfinite(), (raised & -65536).view(torch.float32), numbers).to(torch.bfloat16)


def adamw_step(
    weight: Tensor, gradient: Tensor, moments: Moments, numbers: AdamWNumbers, *, kernels: bool = True
) -> None:
    """Update a weight and its moments in place. Computes in float32."""
    if kernels and weight.is_contiguous() and takes_kernel("adamw_step", weight, gradient, *moments):
        from shardwise.kernels.compact_states_triton import step_moments

        books = [code_book(signed=signed, device=weight.device) for signed in (True, False)]
        step_moments(weight, gradient.contiguous(), moments, numbers, books, BLOCK)
        return
    first, second = decoded(moments)
    given = gradient.float()
    first.lerp_(given, 1 - numbers.beta1)
    second.mul_(numbers.beta2).addcmul_(given, given, value=1 - numbers.beta2)
    size = (second / (1 - numbers.beta2**numbers.step)).sqrt_().add_(numbers.eps)
    new = weight.float() * (1 - numbers.lr * numbers.weight_decay)
    new.addcdiv_(first, size, value=-numbers.lr / (1 - numbers.beta1**numbers.step))
    weight.copy_(new)
    put(moments, first, second, numbers.step)


def decoded(moments: Moments) -> tuple[Tensor, Tensor]:
    """Return both moments in float32, as tensors that may be written."""
    if moments.first_scale is None or moments.second_scale is None:
        return moments.first.float(), moments.second.float()
    return (
        decode(moments.first, moments.first_scale, signed=True),
        decode(moments.second, moments.second_scale, signed=False),
    )


def put(moments: Moments, first: Tensor, second: Tensor, step: int) -> None:
    """Round and store both moments."""
    if moments.first_scale is None or moments.second_scale is None:
        moments.first.copy_(first)
        moments.second.copy_(round_by_chance(second, step))
        return
    for (codes, scale), kept, kept_scale in (
        (encode(first, signed=True), moments.first, moments.first_scale),
        (encode(second, signed=False, step=step), moments.second, moments.second_scale),
    ):
        kept.copy_(codes)
        kept_scale.copy_(scale)


def _chance(numbers: Tensor, step: int) -> Tensor:
    """Return pseudo-random numbers in [0, 1)."""
    return (_hash(numbers.view(torch.int32), step) & 0xFFFFFF).float() / 2**24


def _hash(bits: Tensor, step: int) -> Tensor:
    mixed = bits ^ ((step * 0x9E3779B1 + 2**31) % 2**32 - 2**31)
    for factor in _MIX:
        mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * factor
    return mixed ^ ((mixed >> 15) & 0x1FFFF)


def _num_blocks(weight: Tensor) -> int:
    return -(-weight.numel() // BLOCK)
