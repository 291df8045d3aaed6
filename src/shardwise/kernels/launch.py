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
def overlapping(device: torch.device) -> dict[str, bool]:
    """What a launch is given so that its programs may be placed while those of the kernel before it end.

    They read what no kernel writes (weights), and then wait until the kernel before is over and all that it wrote is
    seen (`gdc_wait`); each lets the next kernel's programs in as soon as it runs (`gdc_launch_dependents`). Every
    program waits before it writes anything or returns, so that the end of one kernel is the end of all before it. From
    Hopper on.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter a few, so that loops over them are tried."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
