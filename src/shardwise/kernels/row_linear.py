"""A linear layer for one row, with what comes before and after it: the building block of a decode step of one sequence.

    x ─┐                                             ┌─ y = W n + b
       + ── new residual ── RMS norm ── n, one row ──┤
    r ─┘                                             └─ activation(G n) * (U n), where W is G above U

The time is that of reading W. Each program reads some rows of W, and meanwhile computes n itself: a few kilobytes,
which costs less than another kernel. A quantised W (`narrow.py`) is read as it is stored.
"""

from typing import cast

from torch import Tensor
from torch.nn.functional import linear

from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.gated import Activation, gated
from shardwise.kernels.narrow import NarrowWeight
from shardwise.kernels.norm import add_rms_norm, rms_norm
from shardwise.kernels.widen import widen


def row_linear(
    x: Tensor,
    weight: Tensor | NarrowWeight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    activation: Activation | None = None,
    kernels: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return [1, out], or half of that with a gate, for `x`, [1, in]; and the new residual (`x` without an old one).

    A residual is added only together with a norm.
    """
    assert residual is None or norm is not None, "a sum that nobody norms"
    given = x, weight if isinstance(weight, Tensor) else weight.scales, bias, residual, norm
    if kernels and takes_kernel("row_linear", *given, lacks=lambda: _lacks(x, weight)):
        from shardwise.kernels.row_linear_triton import forward

        return forward(x, weight, bias, residual, norm, eps, activation)
    new = x
    if norm is not None and residual is not None:
        x, new = add_rms_norm(x, residual, norm, eps, kernels=False)
    elif norm is not None:
        x = rms_norm(x, norm, eps, kernels=False)
    made = linear(x, widen(weight, kernels=kernels), bias)
    if activation is not None:
        made = gated(*cast("tuple[Tensor, Tensor]", made.chunk(2, -1)), activation, kernels=False)
    return made, new


def _lacks(x: Tensor, weight: Tensor | NarrowWeight) -> str | None:
    lies = weight.is_contiguous() if isinstance(weight, Tensor) else weight.has_kernels()
    if x.shape[0] != 1 or not x.is_contiguous():
        return f"{x.shape[0]} rows"
    return None if lies else "weight that lies so, or is of so few bits"
