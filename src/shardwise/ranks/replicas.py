"""The ranks that hold the same parameters: over which of them numbers are shared out, and over which repeated.

all alike          shard over all 8                       least memory
hybrid             shard over the 4 of a node,            gathers stay inside a node; between nodes only a rank's
                   repeat on both nodes                   own shard of the gradients is summed
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """This rank's two groups: `shard` shares out what `copies` repeats."""

    shard: Group
    copies: Group = field(default_factory=Group)

    @property
    def count(self) -> int:
        """How many ranks hold the same parameters."""
        return self.shard.size * self.copies.size


def make_replicas(ranks: Sequence[int], *, shard_size: int | None = None) -> Replicas:
    """Make the groups of this rank and the `ranks` of the world that hold the same. Every rank of the world calls this.

    With `shard_size`, numbers are shared out over so many neighbours and repeated on the others. The groups carry
    nothing else: sums begin when gradients are there, which may be sooner on one rank than on another.
    """
    size = len(ranks) if shard_size is None else shard_size
    if size < 1 or len(ranks) % size:
        fitting = [each for each in range(1, len(ranks) + 1) if len(ranks) % each == 0]
        nearest = min(fitting, key=lambda each: abs(each - size))
        raise ShardwiseError(
            f"{len(ranks)} replicas cannot be sharded in groups of {size}", remedy=f"groups of {nearest}"
        )
    every: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, tuple(ranks))
    rows = [each[start : start + size] for each in sorted(set(every)) for start in range(0, len(each), size)]
    columns = [each[place::size] for each in sorted(set(every)) for place in range(size)]
    return Replicas(shard=_join(rows), copies=_join(columns))


def _join(parts: Sequence[Sequence[int]]) -> Group:
    """Make the groups; return the one that this rank is in. A group of one needs no connection."""
    mine = Group()
    for ranks in parts:
        handle = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if handle is not None and dist.get_rank() in ranks:
            mine = Group(handle)
    return mine
