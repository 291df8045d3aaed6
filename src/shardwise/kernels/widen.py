"""Dequantise a weight: before a product with many rows, and for experts."""

from torch import Tensor

from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.narrow import NarrowWeight


def widen(weight: Tensor | NarrowWeight, *, kernels: bool = True) -> Tensor:
    """Return the dequantised weight; an unquantised one unchanged."""
    if isinstance(weight, Tensor):
        return weight
    # Codes are integers, so the dtype check is of the scales.
    if kernels and weight.has_kernels() and takes_kernel("widen", weight.scales):
        from shardwise.kernels.widen_triton import forward

        return forward(weight)
    return weight.wide()
