"""All-to-all attention (Jacobs et al. 2023): each rank trades its tokens of all heads for all tokens of some heads.

    before       heads 0 1 2 3                 attention        heads 0 1 2 3          and back
    rank 0       tokens of rank 0                               0 0 . .   all tokens
    rank 1       tokens of rank 1                               . . 1 1   all tokens

If the ranks do not divide the heads, some ranks get one head more. Key and value heads that query heads of several
ranks share go to each of those ranks.
"""

from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import Group, exchange
from shardwise.sharding.context.ring import AttentionCall, whole_attention
from shardwise.sharding.zigzag import zigzag_shard, zigzag_unshard


def all_to_all_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks."""
    group, drop = call.group, call.drop
    runs = share_heads(query.shape[1], group.size)
    sharing = query.shape[1] // key.shape[1]
    needed = [range(run.start // sharing, (run.stop - 1) // sharing + 1) for run in runs]
    here, seen = runs[group.rank], needed[group.rank]
    chosen = torch.tensor([head for run in needed for head in run], device=query.device)
    whole = _to_heads(
        [query, key.index_select(1, chosen), value.index_select(1, chosen)], [runs, needed, needed], group
    )
    if len(here) != len(seen) * sharing:
        # Some key head has only part of its query heads here, so every query head gets its own copy.
        own = torch.tensor([head // sharing - seen.start for head in here], device=query.device)
        whole[1:] = [each.index_select(1, own) for each in whole[1:]]
    query, key, value = whole
    own_call = replace(call, drop=None if drop is None else drop.of_heads(here))
    return _to_tokens(whole_attention(query, key, value, own_call), runs, group)


def share_heads(num_heads: int, num_ranks: int) -> list[range]:
    """Return the heads that each rank computes."""
    if num_heads < num_ranks:
        raise ShardwiseError(
            f"{num_heads} heads cannot be distributed over cp={num_ranks} ranks: some would have none",
            remedy=f"cp={num_heads}, or the ring, which does not cut heads",
        )
    counts = [num_heads // num_ranks + (rank < num_heads % num_ranks) for rank in range(num_ranks)]
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def _to_heads(tensors: list[Tensor], runs: list[list[range]], group: Group) -> list[Tensor]:
    """Exchange this rank's tokens of all heads, ordered by receiving rank, for all tokens of this rank's heads.

    All tensors go in one all-to-all. Each has its own runs of heads.
    """
    cuts = [torch.split(each, [len(run) for run in own], 1) for each, own in zip(tensors, runs, strict=True)]
    sent = [sum(cut[rank].numel() for cut in cuts) for rank in range(group.size)]
    flat = torch.cat([cut[rank].flatten() for rank in range(group.size) for cut in cuts])
    arrived = exchange(flat, group, sent, [sent[group.rank]] * group.size)
    shapes = [cut[group.rank].shape for cut in cuts]
    sizes = [shape.numel() for shape in shapes] * group.size
    parts = [part.view(shape) for part, shape in zip(torch.split(arrived, sizes), shapes * group.size, strict=True)]
    return [zigzag_unshard(parts[number :: len(tensors)], 2) for number in range(len(tensors))]


def _to_tokens(heads: Tensor, runs: list[range], group: Group) -> Tensor:
    """Exchange all tokens of this rank's heads for this rank's tokens of all heads: the inverse of `_to_heads`."""
    parts = [zigzag_shard(heads.transpose(0, 1), 2, rank, group.size) for rank in range(group.size)]
    rows = exchange(torch.cat(parts), group, [heads.shape[1]] * group.size, [len(run) for run in runs])
    return rows.transpose(0, 1)
