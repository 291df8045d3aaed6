"""The kernel of `compact_states.py`: a program holds some blocks of a weight, its gradient and moments in registers."""

# mypy: ignore-errors
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Blocks per program, and warps.
ROWS, WARPS = 4, 4


@triton.jit
def _hash(bits, salt):
    mixed = bits ^ salt
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * -2048144789
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * -1028477387
    return mixed ^ ((mixed >> 15) & 0x1FFFF)


@triton.jit
def _below(share, book):
    """Return the last code whose number is at most a share, by bisection; at most the last but one."""
    found = tl.zeros_like(share).to(tl.int32)
    for power in tl.static_range(8):
        step = 128 >> power
        found += tl.where(share >= tl.load(book + found + step), step, 0)
    return tl.minimum(found, 254)


@triton.jit
def _largest(x):
    """Return the number of the largest magnitude in each row, with its sign; NaN if the row has one."""
    has_nan = tl.max((x != x).to(tl.int32), axis=1)
    highest, lowest = tl.max(x, axis=1), tl.min(x, axis=1)
    return tl.where(has_nan == 1, float("nan"), tl.where(highest >= -lowest, highest, lowest))


@triton.jit
def _shares(x, scale, lowest):
    share = x / tl.where(scale == 0.0, 1.0, scale)[:, None]
    return tl.where(share != share, lowest, share)


@triton.jit
def _step(
    weight, gradient, first, second, first_scale, second_scale, signed_book, book, n, num_blocks, salt,
    beta1, beta2, lr, decay, correction1, correction2, eps,
    BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, is_row = at < n, rows < num_blocks
    g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=mask, other=0.0)
    if BITS == 8:
        m = tl.load(signed_book + tl.load(first + at, mask=mask, other=0).to(tl.int32))
        m = m * tl.load(first_scale + rows, mask=is_row, other=0.0)[:, None]
        v = tl.load(book + tl.load(second + at, mask=mask, other=0).to(tl.int32))
        v = v * tl.load(second_scale + rows, mask=is_row, other=0.0)[:, None]
    else:
        m = tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(second + at, mask=mask, other=0.0).to(tl.float32)
    # Elements past the end do not take part in any block's largest number.
    m = tl.where(mask, m + (g - m) * (1.0 - beta1), 0.0)
    v = tl.where(mask, v * beta2 + g * g * (1.0 - beta2), 0.0)
    size = tl.sqrt(v / correction2) + eps
    new = w.to(tl.float32) * (1.0 - lr * decay) - lr / correction1 * m / size
    tl.store(weight + at, new.to(w.dtype), mask=mask)
    chance = _hash(v.to(tl.int32, bitcast=True), salt)
    if BITS == 8:
        m_scale, v_scale = _largest(m), _largest(v)
        m = _shares(m, m_scale, -1.0)
        v = _shares(v, v_scale, 0.0)
        code = _below(m, signed_book)
        low, high = tl.load(signed_book + code), tl.load(signed_book + code + 1)
        tl.store(first + at, (code + (m - low > high - m).to(tl.int32)).to(tl.uint8), mask=mask)
        code = _below(v, book)
        low, high = tl.load(book + code), tl.load(book + code + 1)
        code += ((chance & 0xFFFFFF).to(tl.float32) / 16777216.0 * (high - low) < v - low).to(tl.int32)
        code = tl.where((v > 0.0) & (code == 0), 1, code)
        tl.store(second + at, code.to(tl.uint8), mask=mask)
        tl.store(first_scale + rows, m_scale, mask=is_row)
        tl.store(second_scale + rows, v_scale, mask=is_row)
    else:
        tl.store(first + at, m.to(tl.bfloat16), mask=mask)
        bits = v.to(tl.int32, bitcast=True)
        is_finite = (bits & 0x7F800000) != 0x7F800000
        raised = ((bits + (chance & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
        tl.store(second + at, tl.where(is_finite, raised, v).to(tl.bfloat16), mask=mask)


def step_moments(weight: Tensor, gradient: Tensor, moments, numbers, books, block: int) -> None:
    """Update a contiguous weight and its moments. `books` are the code books of the first and second moments."""
    n = weight.numel()
    if not n:
        return
    in_blocks = moments.first_scale is not None
    num_blocks = triton.cdiv(n, block)
    # Without scales, the kernel does not read the arguments for scales and books.
    scales = (moments.first_scale, moments.second_scale) if in_blocks else (moments.first, moments.first)
    salt = torch.tensor(numbers.step * 0x9E3779B1 % 2**32, dtype=torch.int64, device="cpu").to(torch.int32).item()
    _step[(triton.cdiv(num_blocks, ROWS),)](
        weight.detach(), gradient, moments.first, moments.second, *scales, *books, n, num_blocks, salt,
        numbers.beta1, numbers.beta2, numbers.lr, numbers.weight_decay,
        1 - numbers.beta1**numbers.step, 1 - numbers.beta2**numbers.step, numbers.eps,
        BITS=8 if in_blocks else 16, ROWS=ROWS, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
