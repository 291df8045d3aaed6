"""A weight in fewer bits made wide: before a product of many rows, and of experts."""

from torch import Tensor

from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.narrow import NarrowWeight


def widen(weight: Tensor | NarrowWeight, *, kernels: bool = True) -> Tensor:
    """The weight as it is multiplied with; one that is wide already as it is."""
    if isinstance(weight, Tensor):
        return weight
    # Codes are no numbers to a kernel: what it is told of them are their scales.
    if kernels and weight.has_kernels() and takes_kernel("widen", weight.scales):
        from shardwise.kernels.widen_triton import forward

        return forward(weight)
    return weight.wide()
