"""Parameters that stages on several ranks share: their gradients are summed over those stages too.

They have separate buckets, the same on all of those ranks. So the sum over replicas comes first, and overlaps with
computation; at the end of the step only a rank's own shard is left to be summed over stages. Gradients that only one
replica has (`LocalGradients`) are summed as soon as this rank has its part: the others may join later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from shardwise.ranks.collectives import Group
from shardwise.ranks.exchange import Exchange, Ticket
from shardwise.schedule.placement import Placement
from shardwise.stages.stage import Split
from shardwise.states.buckets.bucket import Bucket

# Channels of ties, which have the same numbers on ranks with different buckets.
_TIES, _BUCKETS_OF_A_TIE = 20_000, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """The names of parameters, and the ranks of a pipeline that hold them.

    `is_copy`: they are all parameters of a stage, of which another rank has a copy; otherwise a few of each stage.
    """

    names: tuple[str, ...]
    group: Group
    is_copy: bool = False


def make_ties(placement: Placement, split: Split, pipelines: Sequence[Sequence[int]], rank: int) -> list[Tie]:
    """Return the ties of a placement, each with its group in this rank's pipeline. Every rank of the world calls this.

    `pipelines` are the world's ranks of every pipeline, `rank` is this one's in the world. A tie within one rank, or of
    other ranks, is a group of one: its parameters need no sum.
    """
    found = []
    for tie, names in zip(placement.ties, names_of_ties(placement, split), strict=True):
        places = sorted({placement.ranks[stage] for stage in tie})
        group = Group()
        for pipeline in pipelines:
            ranks = [pipeline[place] for place in places]
            handle = dist.new_group(ranks) if len(ranks) > 1 else None
            if rank in ranks and handle is not None:
                group = Group(handle)
        found.append(Tie(names=names, group=group, is_copy=not set(names) & set(split.ties)))
    return found


def names_of_ties(placement: Placement, split: Split) -> list[tuple[str, ...]]:
    """Return the parameters that the stages of each tie share.

    A tie of one parameter (a head tied to its embedding) has that parameter; a tie of whole copies of a stage has all
    others of that stage.
    """
    count, copies = split.num_stages, len(placement.pipes)
    shared: dict[tuple[int, ...], list[str]] = {}
    for name, stages in split.ties.items():
        group = tuple(sorted(stage + copy * count for stage in stages for copy in range(copies)))
        shared.setdefault(group, []).append(name)
    found = []
    for tie in placement.ties:
        if tie in shared:
            found.append(tuple(shared[tie]))
        else:
            stage = split.stages[tie[0] % count]
            names = stage.parameters if stage is not None else ()
            found.append(tuple(name for name in names if name not in split.ties))
    return found


class TieSums:
    """The ties of one rank, in the order that is common to all ranks."""

    def __init__(self, ties: Sequence[Tie], buckets: Sequence[Bucket], exchange: Exchange) -> None:
        self._ties, self._buckets, self._exchange = ties, buckets, exchange

    def is_counted(self, bucket: Bucket) -> bool:
        """Whether it is this rank that counts a bucket, where all are counted once."""
        return bucket.key.tie is None or self._ties[bucket.key.tie].group.rank == 0

    def start(self, number: int, step: int) -> None:
        """Start to sum the local gradients of a tie. A tie of other ranks has nothing here."""
        tie = self._ties[number] if number < len(self._ties) else None
        for bucket in self._buckets if tie is not None and tie.group.size > 1 else ():
            if tie is not None and bucket.key.tie == number and bucket.local is not None:
                bucket.local.start_sum(tie.group, step)

    def finish_local(self, step: int) -> None:
        """Make local gradients those of a step."""
        for number in range(len(self._ties)):
            self.start(number, step)
        for bucket in self._buckets:
            if bucket.local is not None:
                bucket.local.finish(step)

    def sum_shards(self) -> None:
        """Sum the shards of gradients that replicas share."""
        under_way: list[Ticket] = []
        for number, tie in enumerate(self._ties):
            mine = [bucket for bucket in self._buckets if bucket.key.tie == number and bucket.local is None]
            assert len(mine) <= _BUCKETS_OF_A_TIE, f"tie {number} has {len(mine)} buckets"
            for place, bucket in enumerate(mine):
                channel = _TIES + number * _BUCKETS_OF_A_TIE + place
                under_way.append(self._exchange.sum_to_all(bucket.result, tie.group, channel))
        for ticket in under_way:
            ticket.wait()
