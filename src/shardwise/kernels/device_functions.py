"""Device functions shared by kernels: activations, tile products, prefetches."""

# mypy: ignore-errors
# ruff: noqa: N803

import torch
import triton
import triton.language as tl

from shardwise.kernels.choose import is_interpreted

#: Bytes of a cache line.
LINE = tl.constexpr(128)


@triton.jit
def tanh(x):
    """Compute tanh from the exponential, which every Triton has; accurate for large x too."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply the gate's activation: silu, gelu, or gelu by tanh."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def slope_of(x, ACTIVATION: tl.constexpr):
    """Return the activation's derivative."""
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-x))
        return s * (1.0 + x * (1.0 - s))
    if ACTIVATION == "gelu":
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    inner = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Multiply two tiles. `PRECISION` comes from `precision_of`."""
    if PRECISION == "interpreted":  # The interpreter's products take the bits of bfloat16 for integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=PRECISION)


def precision_of(dtype: torch.dtype) -> str:
    """Return how `dot` multiplies tiles of a dtype: float32 in full precision, as in the definitions."""
    if is_interpreted():
        return "interpreted"
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def prefetch(addresses):
    """Prefetch cache lines, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_rows(rows, stride, AHEAD: tl.constexpr):
    """Prefetch the first `AHEAD` bytes of each row of a weight."""
    each: tl.constexpr = LINE // (rows.dtype.element_ty.primitive_bitwidth // 8)
    line = tl.minimum(tl.arange(0, AHEAD // LINE) * each, stride - 1)
    prefetch(rows + line[None, :])
