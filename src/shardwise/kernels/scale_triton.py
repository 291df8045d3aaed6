"""Multiply a tensor in place by a factor on the device, without synchronising with the host."""

# Kernels are untyped, and whether Triton is installed would change what a type checker reports.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scale(x, factor, applied, n, BLOCK: tl.constexpr):
    wanted = tl.load(factor).to(tl.float32)
    before = tl.load(applied).to(tl.float32)
    if wanted != before:  # Also true if one of them is NaN, which then propagates.
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(x + at, (value * (wanted / before)).to(x.dtype.element_ty), mask=mask)


def scale_by(x: Tensor, factor: Tensor, applied: Tensor) -> None:
    """Multiply a contiguous `x` by `factor / applied` in place. If they are equal, no element is read."""
    block = 8192
    if x.numel():
        _scale[(triton.cdiv(x.numel(), block),)](x, factor, applied, x.numel(), BLOCK=block, num_warps=8)
