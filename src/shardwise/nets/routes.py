"""Sort tokens by expert: `kernels/experts.py` has the picture, and the kernels for both directions.

This file decides which tokens are dropped if experts have a capacity.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from shardwise.kernels.experts import Order, make_order

#: Maps the experts chosen by each token, [tokens, chosen], and the number of experts to the number of choices of the
#: same expert before each choice, and the number of all choices.
Queue = Callable[[Tensor, int], tuple[Tensor, int]]


def in_line(experts: Tensor, num_experts: int) -> tuple[Tensor, int]:
    """Queue choices on one device: token by token."""
    flat = experts.flatten()
    return one_hot(flat, num_experts).cumsum(0).gather(1, flat[:, None])[:, 0] - 1, flat.numel()


def make_routes(
    experts: Tensor,
    num_experts: int,
    capacity: float | None = None,
    queue: Queue = in_line,
) -> Order:
    """Sort choices by expert; for one expert, by token.

    With a capacity, an expert takes the first of its queue, up to that many times its even share, rounded up.
    """
    if capacity is None:
        return make_order(experts, num_experts)
    places, num_choices = queue(experts, num_experts)
    is_kept = places < math.ceil(capacity * num_choices / num_experts)
    # Dropped choices go to an extra expert after all others.
    flat = torch.where(is_kept, experts.flatten(), num_experts)
    num_kept = flat.numel() if flat.is_meta else int(is_kept.sum())
    order = make_order(flat, num_experts + 1)
    return Order(order.order[:num_kept], order.rows, order.counts[:num_experts])


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Return the number of choices of each expert."""
    flat = experts.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))
