"""RMS norm and layer norm, of x alone or of x added to a residual.

    new = x + residual                                    rounded to its type, as without the kernel
    RMS     y = new / sqrt(mean(new^2) + eps) * w         statistics in float32
    layer   y = (new - mean) / sqrt(var + eps) * w + b

Forward reads x and the residual and writes y and the new residual: 4 numbers per element, where unfused operations move
5. Backward reads the gradients of both and the new residual, and writes one gradient, which x and the residual share:

    dx = rstd (w dy - x^ mean(w dy x^) [- mean(w dy)]) + dnew         x^ = (new [- mean]) rstd
    dw = sum over rows of dy x^              each program sums its rows; then the programs' sums
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import layer_norm as plain_layer_norm
from torch.nn.functional import rms_norm as plain_rms_norm

from shardwise.kernels.choose import autocast_type, takes_kernel

#: The longest row that one program can hold in registers.
MOST_COLUMNS = 32768


def rms_norm(
    x: Tensor, weight: Tensor, eps: float | None = None, *, offset: float = 0.0, kernels: bool = True
) -> Tensor:
    """Compute the RMS norm over the last dim. `eps` of None is that of the dtype, as in `torch.nn.RMSNorm`.

    `offset` is added to the weight in float32, because 1 + w in the weight's dtype would lose digits of w (Gemma).
    """
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if kernels and _is_taken("rms_norm", x, weight):
        return _apply(x, None, weight.float() + offset if offset else weight, None, eps, False)[0]
    if offset:
        return plain_rms_norm(x.float(), (x.shape[-1],), weight.float() + offset, eps).type_as(x)
    return plain_rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float | None = None, *, kernels: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of `x + residual`, and that sum: the next residual."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if kernels and x.shape == residual.shape and _is_taken("add_rms_norm", x, weight, residual):
        return _apply(x, residual, weight, None, eps, False)
    new = x + residual
    return plain_rms_norm(new, (new.shape[-1],), weight, eps), new


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, kernels: bool = True
) -> Tensor:
    """Compute the layer norm over the last dim."""
    if kernels and _is_taken("layer_norm", x, weight, bias):
        return _apply(x, None, weight, bias, eps, True)[0]
    return plain_layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, kernels: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of `x + residual`, and that sum: the next residual."""
    if kernels and x.shape == residual.shape and _is_taken("add_layer_norm", x, weight, bias, residual):
        return _apply(x, residual, weight, bias, eps, True)
    new = x + residual
    return plain_layer_norm(new, (new.shape[-1],), weight, bias, eps), new


def takes_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a norm of these uses a kernel here."""
    return _is_taken("rms_norm" if bias is None else "layer_norm", x, weight, bias)


def _is_taken(name: str, x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    # Under autocast torch returns norms in float32, whatever the input's dtype.
    if autocast_type(x.device) is not None or weight.shape != x.shape[-1:]:
        return False
    if any(each is not None and each.dtype != x.dtype for each in (weight, *others)):
        return False

    def lacks() -> str | None:
        long = x.shape[-1] > MOST_COLUMNS
        return f"rows of {x.shape[-1]:,} numbers ({MOST_COLUMNS:,} it has)" if long else None

    return takes_kernel(name, x, weight, *others, lacks=lacks)


def _apply(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, is_layer: bool
) -> tuple[Tensor, Tensor]:
    if torch.is_inference_mode_enabled():  # Skip torch's custom operator: its overhead exceeds a small norm.
        from shardwise.kernels.norm_triton import launch_norm

        return launch_norm(x, residual, weight, bias, eps, is_layer)[:2]
    made = _Norm.apply(x, residual, weight, bias, eps, is_layer)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", made)


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, is_layer: bool
    ) -> tuple[Tensor, Tensor]:
        from shardwise.kernels.norm_triton import norm_forward

        normed, new, mean, rstd = norm_forward(x, residual, weight, bias, eps, is_layer)
        ctx.save_for_backward(x if residual is None else new, weight, mean, rstd)
        ctx.is_layer, ctx.has_bias, ctx.has_residual = is_layer, bias is not None, residual is not None
        return normed, new

    @staticmethod
    def backward(ctx: Any, d_normed: Tensor, d_new: Tensor) -> tuple[Tensor | None, ...]:
        from shardwise.kernels.norm_triton import norm_backward

        new, weight, mean, rstd = ctx.saved_tensors
        passed = d_new if ctx.has_residual else None
        dx, dw, db = norm_backward(d_normed, passed, new, weight, mean, rstd, ctx.is_layer, ctx.has_bias)
        return dx, dx if ctx.has_residual else None, dw, db if ctx.has_bias else None, None, None
