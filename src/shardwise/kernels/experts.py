"""The operations around the products of a mixture of experts: route, sort by expert, permute and unpermute.

With 2 of 3 experts per token, where `x1` is the second choice of token x:

    choices        a0 a1 b0 b1 c0 c1        going to expert  2 0 1 0 0 2
    in order       a1 b1 c0 | b0 | a0 c1    counts           3 1 2

    route        logits to chosen experts and their weights, one pass over a row
    make_order   choices sorted by expert, and how many each expert has
    permute      tokens to rows; backward: each token sums its rows
    grouped_matmul   each expert's rows with its matrix; the counts stay on the device
    unpermute    rows to tokens: the sum of the experts' outputs times their weights, in one pass without a copy of rows

Nothing waits for the host, and no two programs add to one number: a rerun is bitwise the same.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwise.errors import ShardwiseError
from shardwise.kernels.choose import autocast_type, takes_kernel
from shardwise.torch_private import is_watched

#: The most experts for which a program can hold a row.
MOST_EXPERTS = 1024


class Order(NamedTuple):
    """`order` is the choice at each row, without dropped choices; `rows` is the row of each choice, where dropped ones
    have rows past all others. `counts` is the number of rows of each expert."""

    order: Tensor
    rows: Tensor
    counts: Tensor


def route(
    logits: Tensor,
    num_chosen: int,
    *,
    scores: str = "softmax",
    normalised: bool = True,
    scale: float = 1.0,
    correction: Tensor | None = None,
    kernels: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the weights of the chosen experts, in float32, and their numbers, both [tokens, chosen].

    Scores are softmax or sigmoid of the logits. `correction`, [experts], is added only for the choice. Normalised
    weights sum to `scale`.
    """
    if scores not in ("softmax", "sigmoid"):
        raise ShardwiseError(f"unknown scores {scores!r}", remedy="softmax or sigmoid")
    if not 1 <= num_chosen <= logits.shape[-1]:
        raise ShardwiseError(
            f"{num_chosen} experts cannot be chosen of {logits.shape[-1]}", remedy=f"num_chosen={logits.shape[-1]}"
        )
    if kernels and takes_kernel("route", logits, correction, lacks=lambda: _lacks(logits.shape[-1])):
        is_sigmoid = scores == "sigmoid"
        made = _Route.apply(logits, num_chosen, is_sigmoid, normalised, scale, correction)  # type: ignore[no-untyped-call]
        return cast("tuple[Tensor, Tensor]", made)
    found = logits.float()
    found = found.sigmoid() if scores == "sigmoid" else found.softmax(-1)
    ranked = found.detach() if correction is None else found.detach() + correction
    experts = ranked.topk(num_chosen, dim=-1).indices
    weights = found.gather(1, experts)
    if normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts


def make_order(experts: Tensor, num_experts: int) -> Order:
    """Sort the choices of all tokens, [tokens, chosen], by expert; for one expert, by token.

    This uses torch's sort: for 131,072 choices of 128 experts on an H200 it took 145 us, our counting sort 242 us.
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return Order(order, rows, counts.scatter_add_(0, flat, torch.ones_like(flat)))


def permute(tokens: Tensor, order: Order, *, kernels: bool = True) -> Tensor:
    """Copy [tokens, width] to one row for each choice that is not dropped, sorted by expert."""
    has_kernel = kernels and takes_kernel("permute", tokens, order.order, order.rows)
    return cast(Tensor, _Permute.apply(tokens, order.order, order.rows, has_kernel))  # type: ignore[no-untyped-call]


def unpermute(outputs: Tensor, weights: Tensor, order: Order, *, kernels: bool = True) -> Tensor:
    """Return for each token the weighted sum of its choices' expert outputs. A dropped choice contributes 0.

    `weights` is [tokens, chosen].
    """
    if kernels and takes_kernel("unpermute", outputs, weights, order.order, order.rows):
        made = _Unpermute.apply(outputs, weights, order.rows)  # type: ignore[no-untyped-call]
        return cast(Tensor, made)
    reordered: Tensor = _ByChoice.apply(outputs, order.order, order.rows)  # type: ignore[no-untyped-call]
    choices = reordered.view(*weights.shape, -1)
    return (choices * weights[..., None].type_as(choices)).sum(1)


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply [rows, in], sorted by expert, with each expert's [in, out] of `weights`, [experts, in, out]."""
    if rows.is_meta:
        return rows @ weights[0]  # On the meta device the counts are unknown; the shape and the FLOPs are the same.
    dtype = autocast_type(rows.device)
    if dtype is not None:
        rows, weights = rows.to(dtype), weights.to(dtype)
    if _has_grouped(rows, weights):
        return nn.functional.grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))
    parts = torch.split(rows, counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)])


def _has_grouped(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch has a grouped matmul for these: on Hopper and later, with rows aligned to 16 bytes."""
    return (
        rows.is_cuda
        and rows.dtype == weights.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in weights.shape[1:])
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )


def _lacks(num_experts: int) -> str | None:
    return f"{num_experts:,} experts ({MOST_EXPERTS:,} it has)" if num_experts > MOST_EXPERTS else None


def _by_choice(rows: Tensor, row_of: Tensor) -> Tensor:
    """Gather rows by choice; dropped choices get zeros."""
    return nn.functional.pad(rows, (0, 0, 0, row_of.numel() - rows.shape[0])).index_select(0, row_of)


class _Route(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        num_chosen: int,
        is_sigmoid: bool,
        normalised: bool,
        scale: float,
        correction: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        from shardwise.kernels.experts_triton import choose_experts

        weights, experts = choose_experts(logits, correction, num_chosen, is_sigmoid, normalised, scale)
        ctx.save_for_backward(logits, experts)
        ctx.options = is_sigmoid, normalised, scale
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        from shardwise.kernels.experts_triton import choose_experts_backward

        found = choose_experts_backward(gradient, *ctx.saved_tensors, *ctx.options)
        return found, None, None, None, None, None


class _Permute(Function):
    """Copies each token's row once per choice. Backward: gathers by choice, and sums over each token's choices."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, rows: Tensor, has_kernel: bool) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_chosen = rows.numel() // max(tokens.shape[0], 1)
        ctx.has_kernel = has_kernel
        if has_kernel:
            from shardwise.kernels.experts_triton import copy_rows

            return cast(Tensor, copy_rows(tokens, rows, max(ctx.num_chosen, 1), order.numel()))
        return tokens.index_select(0, order // max(ctx.num_chosen, 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        if ctx.has_kernel and not is_watched():
            from shardwise.kernels.experts_triton import sum_rows

            return sum_rows(gradient, None, rows, max(ctx.num_chosen, 1)), None, None, None
        return _by_choice(gradient, rows).view(-1, ctx.num_chosen, gradient.shape[1]).sum(1), None, None, None


class _ByChoice(Function):
    """Gathers rows by choice. The backward is a gather too, where torch's would use atomic adds."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, order: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _by_choice(outputs, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order), None, None


class _Unpermute(Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        from shardwise.kernels.experts_triton import sum_rows

        ctx.save_for_backward(outputs, weights, rows)
        return cast(Tensor, sum_rows(outputs, weights, rows, weights.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from shardwise.kernels.experts_triton import spread_rows

        outputs, weights, rows = ctx.saved_tensors
        d_outputs, d_weights = spread_rows(gradient, outputs, weights, rows)
        return d_outputs, d_weights, None
