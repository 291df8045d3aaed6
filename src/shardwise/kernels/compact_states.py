"""AdamW with its two moments in 16 or 8 bits: one pass over weights, gradients and states.

    g ──┬── m = b1 m + (1 - b1) g      nearest          ── kept
        └── v = b2 v + (1 - b2) g g    by chance        ── kept
                └── w (1 - lr decay) - lr m' / (sqrt v' + eps), with m and v as they were before they were rounded

In 8 bits a moment is a code for each number, and of each 256 the one of the largest magnitude (Dettmers et al. 2022,
"8-bit optimizers via block-wise quantization"). Codes stand for the numbers of `code_book`: seven decades, the higher
the finer.

The second moment changes by a thousandth in a step, less than half of the distance to the next number that can be kept:
rounded to the nearest it would never fall. So it is rounded up or down by chance, in proportion. Chance is a hash of
the number itself and of the step: a run that goes on, and another plan, round the same numbers alike. In 8 bits it is
never rounded to 0 unless it is: a step over eps alone would be far too long.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels.choose import takes_kernel

#: Numbers that share a scale in 8 bits.
BLOCK = 256
#: Odd numbers of murmur3's last mix, as int32 has them.
_MIX = (-2048144789, -1028477387)


class AdamWNumbers(NamedTuple):
    """What a step of AdamW is made of, beside tensors. `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class Moments(NamedTuple):
    """Both moments as they are kept. Without scales they are in bf16, else codes."""

    first: Tensor
    second: Tensor
    first_scale: Tensor | None = None
    second_scale: Tensor | None = None


@cache
def code_book(*, signed: bool, device: torch.device) -> Tensor:
    """The 256 numbers that codes stand for, in order: 0, 1, and seven decades below 1 with 1, 2, 4, ... 64 each.

    With a sign each has its negative; without, twice as many. A decade's are in the middle of equal parts of it.
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
    """Both, of zeros."""
    if bits == 16:
        zeros = torch.zeros_like(weight, dtype=torch.bfloat16)
        return Moments(zeros, zeros.clone())
    return Moments(
        *(encode(torch.zeros_like(weight, dtype=torch.float32), signed=signed)[0] for signed in (True, False)),
        *(torch.zeros(_num_blocks(weight), device=weight.device) for _ in range(2)),
    )


def decode(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The numbers in float32."""
    numbers = code_book(signed=signed, device=codes.device)[codes.reshape(-1).int()]
    scales = scale.repeat_interleave(BLOCK)[: codes.numel()]
    return (numbers * scales).view(codes.shape)


def encode(numbers: Tensor, *, signed: bool, step: int = 0) -> tuple[Tensor, Tensor]:
    """Codes of float32 numbers, and of each block the one of the largest magnitude.

    With a sign the nearest code, without by chance.
    """
    flat = numbers.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    # With its sign: 1 is in the book, and -1 is not.
    highest, lowest = padded.amax(1), padded.amin(1)
    scale = torch.where(highest >= -lowest, highest, lowest)
    shares = padded / torch.where(scale == 0, 1.0, scale)[:, None]
    book = code_book(signed=signed, device=numbers.device)
    # NaN compares with nothing: its code is the lowest, and its block's scale NaN.
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
    """Float32 numbers in bf16: up or down, in proportion to what is nearer."""
    bits = numbers.view(torch.int32)
    raised = bits + (_hash(bits, step) & 0xFFFF)
    return torch.where(numbers.isfinite(), (raised & -65536).view(torch.float32), numbers).to(torch.bfloat16)


def adamw_step(
    weight: Tensor, gradient: Tensor, moments: Moments, numbers: AdamWNumbers, *, kernels: bool = True
) -> None:
    """Update a weight and its moments in place. All is computed in float32."""
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
    """Both in float32, to be written to."""
    if moments.first_scale is None or moments.second_scale is None:
        return moments.first.float(), moments.second.float()
    return (
        decode(moments.first, moments.first_scale, signed=True),
        decode(moments.second, moments.second_scale, signed=False),
    )


def put(moments: Moments, first: Tensor, second: Tensor, step: int) -> None:
    """Keep both, rounded."""
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
    """From 0 to 1, 1 not among them."""
    return (_hash(numbers.view(torch.int32), step) & 0xFFFFFF).float() / 2**24


def _hash(bits: Tensor, step: int) -> Tensor:
    mixed = bits ^ ((step * 0x9E3779B1 + 2**31) % 2**32 - 2**31)
    for factor in _MIX:
        mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * factor
    return mixed ^ ((mixed >> 15) & 0x1FFFF)


def _num_blocks(weight: Tensor) -> int:
    return -(-weight.numel() // BLOCK)
