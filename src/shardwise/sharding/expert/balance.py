"""The balance of a microbatch whose tokens lie on several ranks.

The balancing loss is a product of two means over tokens, so the mean of the ranks' losses is another number than the
loss of all their tokens. The definition here is the latter: one microbatch, of all replicas together, as on one device
that has it whole. Each layer sums two numbers an expert over the replicas, forward and backward. Tokens that fill up
sequences for cp go to experts like any other, and count in no balance.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.ranks.collectives import Group, copy, sum_over
from shardwise.sharding.wrap_forward import wrap_forward

#: Of this rank's tokens of each sequence, which are of the batch; None for all.
Real = Callable[[], Tensor | None]


def balancing_loss(experts: Tensor, scores: Tensor, group: Group, counted: Tensor | None = None) -> Tensor:
    """N sum f_i P_i (Fedus et al. 2021, eq. 4) over the tokens of all ranks.

    Of N experts, f_i is how often expert i is chosen by a token, and P_i its mean share of a token's scores.

    `experts` are [tokens, chosen] and `scores` [tokens, all], of this rank's tokens, of which those `counted` count.
    All ranks return the same, so it does not matter how much each one's loss weighs in the whole.
    """
    num_experts, num_chosen = scores.shape[1], experts.shape[1]
    shares = scores / scores.sum(-1, keepdim=True)
    if counted is not None:
        experts, shares = experts[counted], shares[counted]
    flat = experts.flatten()
    counts = shares.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat, dtype=shares.dtype))
    load, score = copy(sum_over(torch.stack((counts, shares.sum(0))), group), group)
    num_tokens = load.sum().detach() / num_chosen
    products: Tensor = load.detach() / num_tokens * (score / num_tokens)
    return num_experts * products.sum()


def share_balance(layer: nn.Module, group: Group, real: Real) -> None:
    """Let one of our layers return the balancing loss of all ranks' tokens, if it returns one, and count its load."""
    mixture: Any = getattr(layer, "mixture", None)
    router: Any = getattr(layer, "router", None)
    if group.size == 1 or not isinstance(router, nn.Module):
        return
    weight = getattr(mixture, "auxiliary", 0.0)
    seen: list[Any] = []

    def around_router(call: Callable[..., Any], tokens: Tensor) -> Any:
        seen[:] = [call(tokens)]
        return seen[0]

    def around_layer(call: Callable[..., tuple[Tensor, Tensor | None]], hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        output, balance = call(hidden)
        choice, counted = seen.pop(), _of_all_rows(real(), hidden)
        own = call.args[0]  # type: ignore[attr-defined]
        if counted is not None and own.training:
            added = choice.experts[~counted].flatten()
            own.router.load -= torch.zeros_like(own.router.load).scatter_add_(0, added, torch.ones_like(added))
        if weight:
            balance = weight * balancing_loss(choice.experts, choice.scores, group, counted)
        return output, balance

    wrap_forward(router, around_router)
    wrap_forward(layer, around_layer)


def _of_all_rows(real: Tensor | None, hidden: Tensor) -> Tensor | None:
    return None if real is None or bool(real.all()) else real.to(hidden.device).repeat(hidden.shape[0])
