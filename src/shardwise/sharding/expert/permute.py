"""Rows in another order, and back. Backwards are permutations too: no two rows are added by a race."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def inverse(order: Tensor) -> Tensor:
    """Where each row went."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def reorder(rows: Tensor, order: Tensor) -> Tensor:
    """Row `order[i]` at place i, where `order` has every row once."""
    return _Reorder.apply(rows, order, inverse(order))  # type: ignore[no-untyped-call, no-any-return]


def permute(tokens: Tensor, order: Tensor, num_chosen: int) -> Tensor:
    """[tokens, width] to one row for each choice: choice `order[i]` at place i."""
    return _Permute.apply(tokens, order, inverse(order), num_chosen)  # type: ignore[no-untyped-call, no-any-return]


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Rows of choices, back at their tokens: the sum over each one's choices, weighted with [tokens, chosen]."""
    choices = reorder(rows, inverse(order)).view(*weights.shape, rows.shape[-1])
    return (choices * weights[..., None]).sum(1)


def untouched(rows: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """No rows, from experts that had nothing to do.

    The graph goes on through them all the same: other ranks wait for this one's part in the backward. And gradients are
    zeros, not absent: an optimizer that has a gradient may decay the weight.
    """
    return _Untouched.apply(rows, *parameters)  # type: ignore[no-untyped-call, no-any-return]


class _Reorder(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None


class _Permute(Function):
    """Backward: in the order of the choices again, summed over a token's."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, back: Tensor, num_chosen: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.num_chosen = num_chosen
        return tokens.index_select(0, order // num_chosen)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        by_token = gradient.index_select(0, back).view(-1, ctx.num_chosen, gradient.shape[-1])
        return by_token.sum(1), None, None, None


class _Untouched(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        zeros = [torch.zeros_like(p) if want else None for p, want in zip(ctx.saved_tensors, wanted, strict=True)]
        return gradient, *zeros
