"""The matmuls of cut layers: into rows that are given, weight gradients chunk by chunk, and only what is asked for."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_private import is_wanted


def multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None, into: Tensor) -> None:
    """Write rows @ matrix + bias into a tensor of as many numbers, in one piece or not."""
    in_one_piece = into.is_contiguous()
    flat = into.view(-1, into.shape[-1]) if in_one_piece else rows.new_empty((len(rows), into.shape[-1]))
    if bias is None:
        torch.mm(rows, matrix, out=flat)
    else:
        torch.addmm(bias, rows, matrix, out=flat)
    if not in_one_piece:
        into.copy_(flat.view(into.shape))


def weight_gradient(pairs: Iterable[tuple[Tensor, Tensor]], *, is_transposed: bool) -> Tensor:
    """The gradient of a weight from chunks of what its layer read, each with the gradient of what it made."""
    total: Tensor | None = None
    for given, gradient in pairs:
        left, right = (given.t(), gradient) if is_transposed else (gradient.t(), given)
        total = left @ right if total is None else total.addmm_(left, right)
    assert total is not None, "a layer has at least one chunk"
    return total


def wants(ctx: Any, number: int) -> bool:
    """Whether this run of backward goes on to an input of a node: halves of a backward ask for some only."""
    if not ctx.needs_input_grad[number]:
        return False
    # The engine knows inputs that are tensors, and no others.
    node = ctx.next_functions[sum(ctx.are_tensors[:number])][0]
    return is_wanted(node)


def computing_type(tensor: Tensor) -> torch.dtype:
    """What matmuls compute in: under autocast its type."""
    device = "cpu" if tensor.is_meta else tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype
