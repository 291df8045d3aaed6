"""Balancing loss and capacity over a microbatch of all replicas together, as on one device that holds all of it.

The balancing loss is a product of two means over tokens, so the mean of the ranks' losses differs from the loss over
all their tokens. The latter is the definition here. Each layer sums two numbers per expert over the replicas, in
forward and backward. Padding tokens that cp adds to sequences are routed like any other but do not count in the loss.

An expert takes the first tokens that choose it, up to its capacity. The order is that of one device: replica by
replica (dp), row by row, and token by token within a row. A cp rank holds two pieces of each row.

    one device     row 0: p0 p1 p2 p3   row 1: p0 p1 p2 p3      cp=2: rank 0 has p0 and p3, rank 1 has p1 and p2

So ranks exchange how often each expert is chosen in each piece, and a rank sums the counts that precede its own. Every
layer exchanges one number per expert from each replica, and under cp from each piece of each row. Padding tokens that
cp adds take up no capacity.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from shardwise.ranks.collectives import Group, copy, start_all_gather, sum_over
from shardwise.sharding.wrap_forward import wrap_forward
from shardwise.sharding.zigzag import zigzag_shard, zigzag_unshard

#: Returns which of this rank's tokens of a sequence come from the batch (True) rather than padding; None for all.
Real = Callable[[], Tensor | None]


def balancing_loss(experts: Tensor, scores: Tensor, group: Group, counted: Tensor | None = None) -> Tensor:
    """N sum f_i P_i (Fedus et al. 2021, eq. 4) over the tokens of all ranks.

    Of N experts, f_i is how often a token chooses expert i, and P_i its mean share of a token's scores.

    `experts` is [tokens, chosen] and `scores` [tokens, all], for this rank's tokens. Only tokens in `counted` count.
    All ranks return the same value, so the weight of each rank's loss in the whole does not matter.
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
    """Make one of our layers count load without padding, and return the balancing loss (if any) over all ranks."""
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


def share_capacity(layer: nn.Module, replicas: Group, sequence: Group, real: Real) -> None:
    """Make one of our layers, if it has a capacity, drop what one device with the tokens of all ranks would drop.

    Ranks of `replicas` hold other rows, and ranks of `sequence` other tokens of the same rows, each in rank order.
    """
    here: Any = getattr(layer, "queue", None)
    if getattr(getattr(layer, "mixture", None), "capacity", None) is None or replicas.size * sequence.size == 1:
        return

    def queue(experts: Tensor, num_experts: int) -> tuple[Tensor, int]:
        real_here = real()
        if experts.is_meta or (sequence.size > 1 and real_here is None):
            # A run that inspects the module in order to split it: on the meta device, or with whole sequences.
            return here(experts, num_experts)  # type: ignore[no-any-return]
        pieces = _by_pieces(experts, num_experts, real_here)
        before, num_choices = _before(pieces.sum(2), replicas, sequence)
        places = pieces.cumsum(2) - pieces + before[:, :, None]
        return places.view(-1, num_experts).gather(1, experts.view(-1, 1))[:, 0], num_choices

    setattr(layer, "queue", queue)  # noqa: B010 - a seam of theirs


def _by_pieces(experts: Tensor, num_experts: int, real: Tensor | None) -> Tensor:
    """Return choices [tokens, chosen] as one-hot [rows, pieces, choices, experts], with 0 for padding.

    Without cp, rows are whole and their boundaries do not matter: all are treated as one row of one piece.
    """
    marks = one_hot(experts, num_experts)
    if real is None:
        return marks.view(1, 1, -1, num_experts)
    num_rows = len(experts) // len(real)
    marks = marks * real.to(experts.device).repeat(num_rows)[:, None, None]
    return marks.view(num_rows, 2, -1, num_experts)


def _before(counts: Tensor, replicas: Group, sequence: Group) -> tuple[Tensor, int]:
    """Return each expert's choices before each piece of this rank, [rows, pieces, experts], and the grand total."""
    whole = counts
    if sequence.size > 1:
        parts = start_all_gather(counts[None], sequence).finish()
        whole = zigzag_unshard(list(parts.unbind()), 1)
    totals = start_all_gather(whole.sum((0, 1))[None], replicas).finish()
    before = whole.flatten(0, 1).cumsum(0).view_as(whole) - whole + totals[: replicas.rank].sum(0)
    mine = before if sequence.size == 1 else zigzag_shard(before, 1, sequence.rank, sequence.size)
    return mine, int(torch.sum(totals))
