"""A linear layer whose three products are in fp8, with dynamic scales (recomputed in every call).

    x  ── e4m3 ──┬── x W^T  ── y      forward: rows of x, rows of W
    W  ── e4m3 ──┘
    dy ── e5m2 ──┬── dy W   ── dx     backward: rows of dy, columns of W
                 └── dy^T x ── dW               columns of dy, columns of x

A scale multiplies the fp8 numbers: the largest magnitude of a tensor, or of each row, maps to the largest number of the
type (448, 57344). For the backward x is kept in fp8, as columns, and W in its own dtype: it is cast again. The
definition multiplies the same numbers in double precision. A GPU with fp8 products (capability 8.9) accumulates in
float32; forwards keep fewer bits in between (`FAST`), as is usual.

NaN, and infinity, which leaves no scale for the rest, make their whole row or tensor non-finite, so the optimizer step
is skipped.
"""

from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardwise.kernels.choose import autocast_type, takes_kernel
from shardwise.torch_private import is_input_wanted, scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: The largest number of each type.
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
#: The least magnitude that a scale is computed from, so that a tensor of zeros has one too.
LEAST = 2.0**-100
#: Alignment of the products: both inner sizes and the outer size of the second factor are multiples of this.
MULTIPLE = 16
#: The first compute capability with fp8 products: Ada; Hopper has 9.0.
SINCE = (8, 9)
#: Which products may accumulate with 14 bits in between: those of forwards, as in Transformer Engine and torchao.
FAST = {"forward": True, "backward": False}

#: One scale per tensor, or per row (and per column, where columns are multiplied).
Scales = Literal["tensor", "row"]


class Scaled(NamedTuple):
    """Numbers in fp8, [rows, columns], and the scale that multiplies them: [] or [rows, 1] in float32."""

    numbers: Tensor
    scale: Tensor

    def wide(self) -> Tensor:
        return self.numbers.float() * self.scale


def has_products(device: torch.device) -> bool:
    """Whether a device has fp8 products. Untested on AMD."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= SINCE


def quantise(
    x: Tensor, kind: torch.dtype, scales: Scales = "tensor", *, columns: bool = False, scale: Tensor | None = None,
    kernels: bool = True,
) -> Scaled:  # fmt: skip
    """Cast the rows of a matrix to fp8; or its columns, which become rows, padded with zeros to a `MULTIPLE`.

    `scale` is that of the tensor, if it is known.
    """
    rows, turned = quantise_both(x, kind, scales, rows=not columns, columns=columns, scale=scale, kernels=kernels)
    found = turned if columns else rows
    assert found is not None, "it was asked for"
    return found


def quantise_both(
    x: Tensor, kind: torch.dtype, scales: Scales = "tensor", *, rows: bool = True, columns: bool = True,
    scale: Tensor | None = None, kernels: bool = True,
) -> tuple[Scaled | None, Scaled | None]:  # fmt: skip
    """Cast rows and columns of a matrix to fp8, as asked; in one read if both share a scale."""
    if kernels and takes_kernel("fp8", x):
        from shardwise.kernels import fp8_triton

        make = fp8_triton.by_tensor if scales == "tensor" else fp8_triton.by_row
        made: Any = make(x, kind, rows, columns, scale)
        return tuple(None if each is None else Scaled(*each) for each in made)  # type: ignore[return-value]
    wide = x.float()
    filled = _filled(wide) if columns else wide
    if scales == "row":
        return _by_row(wide, kind) if rows else None, _by_row(filled.t(), kind) if columns else None
    if scale is None:
        scale = wide.abs().amax().clamp(min=LEAST) / LARGEST[kind]
    inverse = scale.reciprocal()
    return (
        Scaled((wide * inverse).to(kind).contiguous(), scale) if rows else None,
        Scaled((filled * inverse).to(kind).t().contiguous(), scale) if columns else None,
    )


def _by_row(wide: Tensor, kind: torch.dtype) -> Scaled:
    scale = wide.abs().amax(1, keepdim=True).clamp(min=LEAST) / LARGEST[kind]
    return Scaled((wide * scale.reciprocal()).to(kind).contiguous(), scale)


def _filled(wide: Tensor) -> Tensor:
    missing = -len(wide) % MULTIPLE
    return functional.pad(wide, (0, 0, 0, missing)) if missing else wide


def multiply(
    left: Scaled, right: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *, products: bool, fast: bool,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply every row of one by every row of the other, [rows of left, rows of right], and add a bias.

    `products`: use the GPU's fp8 products; otherwise the definition. `out` is a contiguous tensor to write to.
    """
    if products:
        return scaled_mm(left, right, dtype, bias, fast=fast, out=out)
    # Sums of such products are exact in double precision, which autocast does not touch.
    made = torch.mm(left.numbers.double(), right.numbers.double().t()) * left.scale * right.scale.t()
    made = (made if bias is None else made + bias).to(dtype)
    return made if out is None else out.copy_(made)


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scales: Scales = "tensor", products: bool | None = None,
    kernels: bool = True,
) -> Tensor:  # fmt: skip
    """Compute `torch.nn.functional.linear` with products in fp8. The weight's sizes must be multiples of 16.

    The output has the input's dtype, or autocast's; each gradient has the dtype of its tensor. `products=False` is the
    definition, which every device has: slow, with the same numbers.
    """
    computing = autocast_type(x.device)
    if x.numel() == 0:
        return functional.linear(x, weight, bias)
    has = has_products(x.device) if products is None else products
    flat = x.reshape(-1, x.shape[-1])
    wants = x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
    how = computing or x.dtype, scales, has, kernels, wants
    made = _Linear.apply(flat, weight, bias, *how)  # type: ignore[no-untyped-call]
    return cast(Tensor, made).view(*x.shape[:-1], weight.shape[0])


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, computing: torch.dtype, scales: Scales,
        products: bool, kernels: bool, wants: tuple[bool, bool, bool],
    ) -> Tensor:  # fmt: skip
        rows, columns = quantise_both(x, E4M3, scales, columns=wants[1], kernels=kernels)
        matrix = quantise(weight, E4M3, scales, kernels=kernels)
        assert rows is not None, "it was asked for"
        ctx.save_for_backward(*((None, None) if columns is None else columns), weight, matrix.scale)
        ctx.kinds = x.dtype, None if bias is None else bias.dtype
        ctx.are_tensors = True, True, bias is not None
        ctx.how = scales, products, kernels, wants
        made = multiply(rows, matrix, computing, bias, products=products, fast=FAST["forward"])
        if torch.compiler.is_compiling():
            # Torch 2.11's compiler treats a result that no differentiable operation made as one without a gradient,
            # and backwards would begin with zeros. Adding zero, which is fused with the next operation, avoids that.
            first = rows.scale.flatten()[0]
            made = made + (first - first)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        numbers, scale, weight, weight_scale = ctx.saved_tensors
        scales, products, kernels, wants = ctx.how
        if not torch.compiler.is_compiling():  # A compiled backward is split as a whole (`stages/compiled.py`).
            wants = tuple(is_input_wanted(ctx, number) for number in range(3))
        rows, columns = quantise_both(gradient, E5M2, scales, rows=wants[0], columns=wants[1], kernels=kernels)
        found: list[Tensor | None] = [None, None, None]
        if rows is not None:
            known = weight_scale if scales == "tensor" else None
            back = quantise(weight, E4M3, scales, columns=True, scale=known, kernels=kernels)
            found[0] = multiply(rows, back, ctx.kinds[0], products=products, fast=FAST["backward"])
        if columns is not None:
            given = Scaled(numbers, scale)
            found[1] = multiply(columns, given, weight.dtype, products=products, fast=FAST["backward"])
        if wants[2]:
            found[2] = gradient.sum(0, dtype=torch.float32).to(ctx.kinds[1])
        return *found, None, None, None, None, None
