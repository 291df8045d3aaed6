"""Which parameters had a gradient in a step, on any replica.

One that had none anywhere is left alone by the optimizer, as on one device: no decay, no momentum. A replica cannot
know that by itself, so a flag for each parameter is summed.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.ranks.collectives import Group
from shardwise.ranks.exchange import Exchange, Ticket
from shardwise.ranks.mesh import Replicas
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.gradients import sum_over
from shardwise.states.buckets.tie_groups import Tie

# Channels. Ties are numbered alike on ranks whose replicas are not.
_REPLICAS, _TIES = 16_384, 30_000


class UnusedParameters:
    """The flags of all buckets that are trained. What they send is not counted: it is no part of the model."""

    def __init__(self, buckets: Sequence[Bucket], ties: Sequence[Tie], exchange: Exchange) -> None:
        self._exchange = exchange
        by_group: dict[Replicas, list[Bucket]] = {}
        #: What one replica alone has: it asks nobody.
        self._alone = [bucket for bucket in buckets if bucket.home.replicas.count == 1]
        for bucket in buckets:
            if bucket.home.replicas.count > 1:
                by_group.setdefault(bucket.home.replicas, []).append(bucket)
        self._groups = [
            (Replicas(shard=_uncounted(replicas.shard), copies=_uncounted(replicas.copies)), mine)
            for replicas, mine in by_group.items()
        ]
        self._ties = [
            (
                number,
                _uncounted(tie.group),
                [bucket for bucket in buckets if bucket.home.tie == number and bucket.local is None],
            )
            for number, tie in enumerate(ties)
        ]
        self._asked: list[tuple[Tensor, list[Ticket]]] = []

    def start(self) -> None:
        """Ask the replicas."""
        self._asked = []
        for number, (replicas, buckets) in enumerate(self._groups):
            flags = _flags([bucket.trained.used for bucket in buckets], buckets[0].home.device)
            self._asked.append((flags, sum_over(flags, replicas, self._exchange, _REPLICAS + 2 * number)))

    def read(self) -> Mapping[Bucket, list[bool]]:
        """The answers, with those of tied stages."""
        used: dict[Bucket, list[bool]] = {bucket: list(bucket.trained.used) for bucket in self._alone}
        for (flags, tickets), (_, buckets) in zip(self._asked, self._groups, strict=True):
            for ticket in tickets:
                ticket.wait()
            used |= _answers(flags, buckets)
        for number, group, buckets in self._ties:
            if buckets and group.size > 1:
                flags = _flags([used[bucket] for bucket in buckets], buckets[0].home.device)
                self._exchange.sum_to_all(flags, group, _TIES + number).wait()
                used |= _answers(flags, buckets)
        return used

    def close(self) -> None:
        """Let go of the groups."""
        self._groups.clear()
        self._ties.clear()


def _uncounted(group: Group) -> Group:
    """The same ranks, with a count of their own."""
    return Group(group.handle)


def _flags(used: Sequence[Sequence[bool]], device: torch.device) -> Tensor:
    return torch.tensor([float(flag) for flags in used for flag in flags], device=device)


def _answers(flags: Tensor, buckets: Sequence[Bucket]) -> dict[Bucket, list[bool]]:
    answers = iter(flags.tolist())
    return {bucket: [next(answers) > 0 for _ in bucket.layout.slots] for bucket in buckets}
