"""Weights that are moved for a trial: those that training begins with may hide what training brings out.

    gate = nn.Parameter(torch.zeros(()))      a branch adds nothing, until the gate has moved
    nn.init.zeros_(adapter.up.weight)         so does an adapter

Small parameters that are trained are moved; of large and of frozen ones, those that are all 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

#: Parameters with at most this many elements are moved, and copied for that: norms, gates, factors of adapters.
_SMALL = 2**18
#: The most that they are moved by, relative to their size; and those that are 0, or nearly.
_BY, _AT_LEAST = 0.5, 0.1


@contextmanager
def moved_weights(module: nn.Module) -> Iterator[bool]:
    """Move weights within the context; whether there are any to move. Afterwards they are exactly as before."""
    kept: list[tuple[Tensor, Tensor | None]] = []
    try:
        with torch.no_grad():
            for place, each in enumerate(module.parameters()):
                if _can_move(each):
                    kept.append((each.data, each.data.clone() if each.numel() <= _SMALL else None))
                    _move(each.data, place)
        yield bool(kept)
    finally:
        with torch.no_grad():
            # In reverse order: two parameters may share memory.
            for data, value in reversed(kept):
                if value is None:
                    data.zero_()
                else:
                    data.copy_(value)


def _can_move(each: Tensor) -> bool:
    if nn.parameter.is_lazy(each) or each.is_meta or each.is_inference() or not each.is_floating_point():
        return False
    if each.layout is not torch.strided or 0 in each.stride() or not each.numel():
        return False
    return (each.requires_grad and each.numel() <= _SMALL) or not bool(each.any())


def _move(data: Tensor, place: int) -> None:
    """Move two equal parameters differently: `place` is their place in the module."""
    # Not drawn: trials leave generators alone.
    number = torch.arange(1, 1 + data.numel(), dtype=torch.float64, device=data.device)
    size = max(float(data.double().square().mean().sqrt()), _AT_LEAST)
    data.add_(number.square_().mul_(0.7).add_(place).cos_().mul_(_BY * size).view(data.shape).to(data.dtype))
