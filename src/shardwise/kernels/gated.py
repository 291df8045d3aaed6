"""The gate of an MLP: activation(gate) * up, in one pass.

    silu         g sigmoid(g)                                   SwiGLU
    gelu         g (1 + erf(g / sqrt 2)) / 2                    GeGLU
    gelu_tanh    g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) / 2

Forward reads gate and up and writes their product: 3 numbers per element, where unfused operations move 5. Backward
reads the gradient, gate and up, recomputes the activation and writes two gradients: 5 numbers. Only the inputs are
saved.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardwise.errors import ShardwiseError, nearest
from shardwise.kernels.choose import takes_kernel

Activation = Literal["silu", "gelu", "gelu_tanh"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def gated(gate: Tensor, up: Tensor, activation: Activation = "silu", *, kernels: bool = True) -> Tensor:
    """Return `activation(gate) * up`, of the same shape; halves of one tensor are read in place."""
    if activation not in ACTIVATIONS:
        raise ShardwiseError(
            f"unknown activation {activation!r}", remedy=nearest(activation, list(ACTIVATIONS)) or "silu"
        )
    is_alike = gate.shape == up.shape and gate.dtype == up.dtype
    if kernels and is_alike and takes_kernel("gated", gate, up):
        if torch.is_inference_mode_enabled():
            from shardwise.kernels.gated_triton import launch_gated

            return launch_gated(gate, up, activation)
        return cast(Tensor, _Gated.apply(gate, up, activation))  # type: ignore[no-untyped-call]
    return ACTIVATIONS[activation](gate) * up


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        from shardwise.kernels.gated_triton import gated_forward

        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return cast(Tensor, gated_forward(gate, up, activation))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from shardwise.kernels.gated_triton import gated_backward

        made = gated_backward(gradient, *ctx.saved_tensors, ctx.activation)
        return made[0], made[1], None
