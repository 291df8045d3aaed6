"""What all launches ask: how tensors lie, and how many processors there are."""

from functools import cache
from math import prod

import torch
from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """The same numbers as [rows, columns], each row in one piece; copied only where they do not lie at equal distances.

    Two dims, so that `stride(0)` is the distance: the stride of a dim of one element says nothing (a single key head,
    turned around, is contiguous whatever its stride).
    """
    columns = x.shape[-1]
    flat = x.reshape(prod(x.shape[:-1]), columns)
    return flat if flat.stride(1) == 1 or columns == 1 else flat.contiguous()


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter a few, so that loops over them are tried."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
