"""Products of the gradients of a loss: a few numbers by which parts of a batch or of sequences can be compared.

A hook, an `autograd.Function` or `x + m - m.detach()` may mix rows or tokens only in the backward: then parts give the
loss of the whole, but not its gradient. The gradient of each small parameter is multiplied by fixed numbers and summed.
That is linear, so products of parts combine as their losses do.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.stages.checkpoints import nothing_recomputed

#: Parameters with at most this many elements are used: there are some between any two larger ones.
_SMALL = 2**20
#: Gradients below this share of the largest are rounding.
_LEAST = 1e-3


class Products(NamedTuple):
    """The product of each small parameter, and the magnitude that rounding is relative to."""

    names: list[str]
    products: Tensor
    sizes: Tensor


def products_of(total: Tensor, module: nn.Module) -> Products | None:
    """Return the products for a loss with its graph, which is kept; None if it has no gradient."""
    found = {name: each for name, each in module.named_parameters() if each.requires_grad and each.numel() <= _SMALL}
    if not total.requires_grad or not found:
        return None
    with nothing_recomputed():
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            total.sum(), list(found.values()), allow_unused=True, retain_graph=True
        )
    products, norms = [], []
    for each in gradients:
        flat = total.new_zeros(1).double() if each is None else _real(each.detach()).flatten().double()
        # Not drawn: a trial makes draws constant. None of these is 0, so the gradient of a scalar counts too.
        fixed = torch.arange(1, 1 + flat.numel(), dtype=flat.dtype, device=flat.device).mul_(0.7).cos_()
        products.append(flat @ fixed)
        norms.append(flat.norm())
    sizes = torch.stack(norms)
    return Products(list(found), torch.stack(products), sizes.clamp_min(_LEAST * float(sizes.max())))


def _real(each: Tensor) -> Tensor:
    return torch.view_as_real(each) if each.is_complex() else each
