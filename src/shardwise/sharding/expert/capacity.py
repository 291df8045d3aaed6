"""A capacity of a microbatch of all replicas together, as on one device that has it whole.

An expert takes the first of those who choose it, up to its capacity. Who is first is said by the order on one device:
replica by replica (dp), row by row, and token by token in a row, of which a rank of cp has two pieces.

    one device     row 0: p0 p1 p2 p3   row 1: p0 p1 p2 p3      cp=2: rank 0 has p0 and p3, rank 1 has p1 and p2

So ranks tell each other how often each expert is chosen in each piece, and a rank adds up what comes before its own:
for every layer one number an expert, from each replica, and under cp from each piece of each row. Tokens that fill up
sequences for cp stand in nobody's way.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from shardwise.ranks.collectives import Group, start_all_gather
from shardwise.sharding.expert.balance import Real
from shardwise.sharding.zigzag import zigzag_shard, zigzag_unshard


def share_capacity(layer: nn.Module, replicas: Group, sequence: Group, real: Real) -> None:
    """Let one of our layers, if it has a capacity, drop what one device would drop that has the tokens of all ranks.

    `replicas` have other rows and `sequence` other tokens of the same rows, each in their order.
    """
    here: Any = getattr(layer, "queue", None)
    if getattr(getattr(layer, "mixture", None), "capacity", None) is None or replicas.size * sequence.size == 1:
        return

    def queue(experts: Tensor, num_experts: int) -> tuple[Tensor, int]:
        real_here = real()
        if experts.is_meta or (sequence.size > 1 and real_here is None):
            # A look at the module, by which it is split: without numbers, or with sequences that are whole.
            return here(experts, num_experts)  # type: ignore[no-any-return]
        pieces = _by_pieces(experts, num_experts, real_here)
        before, num_choices = _before(pieces.sum(2), replicas, sequence)
        places = pieces.cumsum(2) - pieces + before[:, :, None]
        return places.view(-1, num_experts).gather(1, experts.view(-1, 1))[:, 0], num_choices

    setattr(layer, "queue", queue)  # noqa: B010 - a seam of theirs


def _by_pieces(experts: Tensor, num_experts: int, real: Tensor | None) -> Tensor:
    """Choices of [tokens, chosen] as [rows, pieces, choices, experts]: 1 where one is of an expert, and counts.

    Rows that are whole need not be told apart: they are one.
    """
    marks = one_hot(experts, num_experts)
    if real is None:
        return marks.view(1, 1, -1, num_experts)
    num_rows = len(experts) // len(real)
    marks = marks * real.to(experts.device).repeat(num_rows)[:, None, None]
    return marks.view(num_rows, 2, -1, num_experts)


def _before(counts: Tensor, replicas: Group, sequence: Group) -> tuple[Tensor, int]:
    """How often each expert is chosen before each piece of this rank, [rows, pieces, experts], and all choices."""
    whole = counts
    if sequence.size > 1:
        parts = start_all_gather(counts[None], sequence).finish()
        whole = zigzag_unshard(list(parts.unbind()), 1)
    totals = start_all_gather(whole.sum((0, 1))[None], replicas).finish()
    before = whole.flatten(0, 1).cumsum(0).view_as(whole) - whole + totals[: replicas.rank].sum(0)
    mine = before if sequence.size == 1 else zigzag_shard(before, 1, sequence.rank, sequence.size)
    return mine, int(torch.sum(totals))
