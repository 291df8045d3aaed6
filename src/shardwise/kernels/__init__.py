"""Fused Triton kernels, each beside its plain torch definition. Usable alone: `from shardwise import kernels`.

Every function here uses its kernel if there is one for the device and dtype, and otherwise its definition: on a CPU,
under `kernels=False`, and while a dispatch mode records operators. Both give the same numbers within rounding.

    norm, rotary, gated, ...              definition, backward and choice
      |            |
    choose       norm_triton, ...         kernel or definition; the Triton programs, imported on first use
      |            |
    launch, compile_ahead                 layouts and launches; kernels compiled ahead by many threads
"""

from shardwise.kernels.adamw import fused_adam
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.kernels.experts import grouped_matmul, make_order, permute, route, unpermute
from shardwise.kernels.fp8 import fp8_linear
from shardwise.kernels.gated import gated
from shardwise.kernels.linear_cross_entropy import linear_cross_entropy
from shardwise.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from shardwise.kernels.rotary import rotary

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "fp8_linear",
    "fused_adam",
    "gated",
    "grouped_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "make_order",
    "permute",
    "rms_norm",
    "rotary",
    "route",
    "unpermute",
]
