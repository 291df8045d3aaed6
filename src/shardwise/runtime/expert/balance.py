"""The balancing loss of a microbatch whose tokens lie on several ranks.

It is a product of two means over tokens, so the mean of the ranks' losses is another number than the loss of all their
tokens. The definition here is the latter: one microbatch, of all replicas together, as on one device that has it whole.
Each layer sums two numbers an expert over the replicas, forward and backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.collectives import Group, copy, sum_over
from shardwise.runtime.tensor.around import surround


def balancing_loss(experts: Tensor, scores: Tensor, group: Group) -> Tensor:
    """The number of experts times the sum of each one's load and mean score, over the tokens of all ranks.

    `experts` are [tokens, chosen] and `scores` [tokens, all], of this rank's tokens. All ranks return the same, so it
    does not matter how much each one's loss weighs in the whole.
    """
    num_experts, flat = scores.shape[1], experts.flatten()
    shares = scores / scores.sum(-1, keepdim=True)
    counts = shares.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat, dtype=shares.dtype))
    load, score = copy(sum_over(torch.stack((counts, shares.sum(0))), group), group)
    num_tokens = load.sum().detach() / experts.shape[1]
    products: Tensor = load.detach() / num_tokens * (score / num_tokens)
    return num_experts * products.sum()


def share_balance(layer: nn.Module, group: Group) -> None:
    """Let one of our layers return the balancing loss of all ranks' tokens, if it returns one."""
    mixture: Any = getattr(layer, "mixture", None)
    router = getattr(layer, "router", None)
    if group.size == 1 or not isinstance(router, nn.Module) or not getattr(mixture, "auxiliary", 0.0):
        return
    seen: list[Any] = []

    def around_router(call: Callable[..., Any], tokens: Tensor) -> Any:
        seen[:] = [call(tokens)]
        return seen[0]

    def around_layer(call: Callable[..., tuple[Tensor, Tensor]], hidden: Tensor) -> tuple[Tensor, Tensor]:
        output, _ = call(hidden)
        choice = seen.pop()
        return output, mixture.auxiliary * balancing_loss(choice.experts, choice.scores, group)

    surround(router, around_router)
    surround(layer, around_layer)
