"""What all launches ask: how tensors lie, and how many processors there are."""

from functools import cache

import torch
from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """The same numbers as rows at equal distances, each row in one piece; copied only where they do not lie so."""
    if x.is_contiguous():
        return x
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    if x.dim() > 2 and x.stride(-1) == 1:
        # All dims but the last as one: each must step over exactly what is within it.
        step = x.stride(-2)
        for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
            if size != 1 and stride != step:
                return x.contiguous()
            step *= size
        return x
    return x.contiguous()


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter a few, so that loops over them are tried."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
