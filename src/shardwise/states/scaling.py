"""Gradients times a number, with the same bits wherever they are multiplied.

On a GPU, torch's fused optimizers divide gradients while they read them. Gradients that are scaled separately (sums
over replicas, gradients on the host) are also divided on a GPU, because `x / (1 / s)` and `x * s` differ in the last
bit. 16-bit numbers are multiplied: a divisor on the device would be rounded to 16 bits first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.torch_private import foreach_divide, foreach_scale


def multiply(tensor: Tensor, factor: float) -> Tensor:
    """Multiply in place."""
    if factor == 1.0:
        return tensor
    return tensor.div_(_divisor(factor, tensor.device)) if _is_divided(tensor) else tensor.mul_(factor)


def multiply_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply many tensors in place, in few launches."""
    if factor == 1.0:
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in tensors:
        if _is_divided(each):
            by_device.setdefault(each.device, []).append(each)
    for device, some in by_device.items():
        foreach_divide(some, _divisor(factor, device))
    multiplied = [each for each in tensors if not _is_divided(each)]
    if multiplied:
        foreach_scale(multiplied, factor)


def _is_divided(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype is torch.float32


def _divisor(factor: float, device: torch.device) -> Tensor:
    return torch.full((), 1 / factor, device=device)
