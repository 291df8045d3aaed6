"""Mixture of experts: route, sort by expert, compute, and restore the order.

hidden ── router ── routes ── permute ── exchange(experts) ── unpermute ──┬── output
   └──────────────────────── shared experts, meanwhile ───────────────────┘
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwise.kernels.experts import permute, unpermute
from shardwise.nets.experts import Experts
from shardwise.nets.feedforward import FeedForward
from shardwise.nets.router import Router, balancing_loss
from shardwise.nets.routes import Queue, count_choices, in_line, make_routes
from shardwise.nets.settings import Settings

#: Maps the experts, rows sorted by expert, the number of rows per expert (over all experts), and a function to run
#: while bytes move, to the experts' outputs in the same order and the result of that function.
Exchange = Callable[[Experts, Tensor, Tensor, Callable[[], Tensor | None]], tuple[Tensor, Tensor | None]]


def all_here(
    experts: Experts, rows: Tensor, counts: Tensor, meanwhile: Callable[[], Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Compute on one device, without an exchange."""
    return experts(rows, counts), meanwhile()


class MoE(nn.Module):
    """One layer of experts. Expert parallelism replaces `exchange`, and leaves each rank's experts in `experts`. If
    tokens are on several ranks, `queue` counts those of the other ranks too."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        mixture, width, mlp = settings.mixture, settings.width, settings.mlp
        assert mixture is not None, "the settings have no mixture"
        self.mixture = mixture
        self.router = Router(width, mixture)
        self.experts = Experts(mixture.num_experts, width, mixture.width, mlp.activation)
        shared = replace(mlp, width=mixture.width * mixture.num_shared)
        self.shared = FeedForward(width, shared) if mixture.num_shared else None
        self.exchange: Exchange = all_here
        self.queue: Queue = in_line
        self.kernels = True

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the weighted balancing loss if the settings give it a weight."""
        tokens = hidden.flatten(0, -2)
        choice = self.router(tokens)
        count, capacity = self.mixture.num_experts, self.mixture.capacity
        routes = make_routes(choice.experts, count, capacity, self.queue)
        # Dropped tokens count too: the balance concerns what the router asks for.
        load = routes.counts if capacity is None else count_choices(choice.experts, count)
        if self.training:
            with torch.no_grad():
                self.router.load += load
        made, shared = self.exchange(
            self.experts,
            permute(tokens, routes, kernels=self.kernels),
            routes.counts,
            lambda: None if self.shared is None else self.shared(tokens),
        )
        output = unpermute(made, choice.weights, routes, kernels=self.kernels)
        output = (output if shared is None else output + shared).view_as(hidden)
        if not self.mixture.auxiliary:
            return output, None
        return output, self.mixture.auxiliary * balancing_loss(choice, load)
