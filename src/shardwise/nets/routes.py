"""Tokens in the order of their experts, and back.

With 2 of 3 experts a token, and `x1` for the choice of token x that is its second:

    choices        a0 a1 b0 b1 c0 c1        going to expert  2 0 1 0 0 2
    in order       a1 b1 c0 | b0 | a0 c1    counts           3 1 2

Both ways are permutations, so their backwards are too: no two rows are ever added by a race, and a rerun is bitwise
the same.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import one_hot, pad


class Routes(NamedTuple):
    """`order` is the choice at each row, without those that are dropped; `rows` is the row of each choice, and dropped
    ones have rows behind all others. `counts` is the number of rows of each expert."""

    order: Tensor
    rows: Tensor
    counts: Tensor


#: From the experts chosen by each token, [tokens, chosen], and the number of experts: how many choices of the same
#: expert come before each choice, and how many choices there are in all.
Queue = Callable[[Tensor, int], tuple[Tensor, int]]


def in_line(experts: Tensor, num_experts: int) -> tuple[Tensor, int]:
    """The queue of one device: token by token."""
    flat = experts.flatten()
    return one_hot(flat, num_experts).cumsum(0).gather(1, flat[:, None])[:, 0] - 1, flat.numel()


def make_routes(experts: Tensor, num_experts: int, capacity: float | None = None, queue: Queue = in_line) -> Routes:
    """Sort choices by expert; within one, by token.

    With a capacity, an expert takes the first of its queue, up to that many times its even share, rounded up.
    """
    flat = experts.flatten()
    num_kept = flat.numel()
    if capacity is not None:
        places, num_choices = queue(experts, num_experts)
        is_kept = places < math.ceil(capacity * num_choices / num_experts)
        flat = torch.where(is_kept, flat, num_experts)
        if not flat.is_meta:
            num_kept = int(is_kept.sum())
    order = flat.argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return Routes(order[:num_kept], rows, count_choices(flat, num_experts + 1)[:num_experts])


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """How many choices fell on each expert."""
    flat = experts.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))


def to_experts(tokens: Tensor, routes: Routes) -> Tensor:
    """[tokens, width] to one row for each choice that is kept, in the order of the experts."""
    reordered: Tensor = _ToExperts.apply(tokens, routes.order, routes.rows)  # type: ignore[no-untyped-call]
    return reordered


def to_tokens(outputs: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """What experts made of each row, back at its token: the weighted sum over its choices. A dropped one gives 0."""
    reordered: Tensor = _ToTokens.apply(outputs, routes.order, routes.rows)  # type: ignore[no-untyped-call]
    choices = reordered.view(*weights.shape, -1)
    return (choices * weights[..., None].type_as(choices)).sum(1)


def _by_choice(rows: Tensor, row_of: Tensor) -> Tensor:
    """From rows to choices; those without a row get zeros."""
    return pad(rows, (0, 0, 0, row_of.numel() - rows.shape[0])).index_select(0, row_of)


class _ToExperts(Function):
    """Each token's row as often as it was chosen. Backward: back in the order of the choices, summed over a token's."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_chosen = rows.numel() // max(tokens.shape[0], 1)
        return tokens.index_select(0, order // max(ctx.num_chosen, 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _by_choice(gradient, rows).view(-1, ctx.num_chosen, gradient.shape[1]).sum(1), None, None


class _ToTokens(Function):
    """The same the other way round, without the sum."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, order: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _by_choice(outputs, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order), None, None
