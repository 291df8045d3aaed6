"""Whole parameters for optimizers that must see them so, where ranks hold pieces.

Each parameter has an owner among the ranks that share it. The pieces of its gradient go to the owner, which has the
whole weight and the optimizer's state for it, and pieces of the new weight come back. Every rank owns about as much.

    rank 0   a1 b1 ─┬─> a1 a2 = a     step     a ─┬─> a1 b1
    rank 1   a2 b2 ─┴─> b1 b2 = b     step     b ─┴─> a2 b2

Under tensor parallelism a rank's whole is itself a piece, and of experts it has some; those are joined before the step,
on every such rank alike.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.ranks.collectives import Group, start_all_to_all
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.flat_layout import Slot, Span
from shardwise.states.buckets.tensor_interface import Joining

#: Gives some numbers of a bucket that this rank has, on the device.
Read = Callable[[Bucket, Span], Tensor]


class Owned(NamedTuple):
    """A parameter that has an owner."""

    bucket: Bucket
    slot: Slot
    number: int


class Owners:
    """The parameters of some buckets that are shared out over one group."""

    def __init__(self, entries: Sequence[Owned], group: Group, costs: Sequence[int], joining: Joining | None) -> None:
        self._group, self._joining = group, joining
        self._of = _share_out(entries, costs, group.size)
        self._mine = self._of[group.rank]
        #: What each rank has of each parameter.
        self._spans = [_spans_by_slot((entry.bucket for entry in entries), rank) for rank in range(group.size)]
        self.weights = [nn.Parameter(self._joined(entry, part)) for entry, part in self._to_owners(_weight, self._of)]

    @property
    def names(self) -> list[tuple[str, int]]:
        """What the weights are called: all begin at their first number."""
        return [(entry.slot.name, 0) for entry in self._mine]

    @torch.no_grad()
    def refresh(self) -> None:
        """The ranks' pieces were changed from outside: take them over."""
        for weight, (entry, part) in zip(self.weights, self._to_owners(_weight, self._of), strict=True):
            weight.copy_(self._joined(entry, part))

    @torch.no_grad()
    def give(self, used: Callable[[Bucket], Sequence[bool]]) -> None:
        """Bring the gradients to the owners."""
        for weight, (entry, part) in zip(self.weights, self._to_owners(_gradient, self._of), strict=True):
            whole = self._joined(entry, part).to(weight.dtype)
            weight.grad = whole if used(entry.bucket)[entry.number] else None

    @torch.no_grad()
    def take_back(self) -> None:
        """Bring the new weights to the ranks' pieces."""
        wholes = [self._cut(entry, weight) for entry, weight in zip(self._mine, self.weights, strict=True)]
        for weight in self.weights:
            weight.grad = None
        self._send_back(self._of, wholes)

    def _send_back(self, of: Sequence[Sequence[Owned]], wholes: Sequence[Tensor]) -> None:
        """Bring the parameters of some owners, of which this rank's are `wholes`, to the ranks' pieces."""
        size, rank = self._group.size, self._group.rank
        bucket = next(entry for entries in of for entry in entries).bucket
        like = torch.empty(0, dtype=bucket.kept.dtype, device=bucket.home.device)
        sent = [[w[s.start : s.stop] for e, w in zip(of[rank], wholes, strict=True) for s in self._part(e, other)]
                for other in range(size)]  # fmt: skip
        lengths = [sum(s.length for e in of[other] for s in self._part(e, rank)) for other in range(size)]
        arrived = self._exchange(sent, lengths, like)
        for other in range(size):
            at = 0
            for entry in of[other]:
                for span in self._part(entry, rank):
                    _weight(entry.bucket, span).copy_(arrived[other][at : at + span.length])
                    at += span.length

    def _to_owners(self, read: Read, of: Sequence[Sequence[Owned]]) -> list[tuple[Owned, Tensor]]:
        """Each parameter of this rank's, of some, flattened, from the pieces that `read` gives on every rank."""
        size, rank = self._group.size, self._group.rank
        sent = [[read(e.bucket, s) for e in of[other] for s in self._part(e, rank)] for other in range(size)]
        lengths = [sum(s.length for e in of[rank] for s in self._part(e, other)) for other in range(size)]
        # A rank that has no piece sends nothing, of the others' type.
        first = next(entry for entries in of for entry in entries)
        arrived = self._exchange(sent, lengths, read(first.bucket, Span(first.slot, 0, 0, 0)))
        places, found = [0] * size, []
        for entry in of[rank]:
            parts = []
            for other in range(size):
                for span in self._part(entry, other):
                    parts.append(arrived[other][places[other] : places[other] + span.length])
                    places[other] += span.length
            found.append((entry, torch.cat(parts)))
        return found

    def _exchange(self, sent: list[list[Tensor]], lengths: list[int], like: Tensor) -> Sequence[Tensor]:
        flat = torch.cat([part.detach().to(like.dtype) for parts in sent for part in parts] or [like.new_empty(0)])
        counts = [sum(part.numel() for part in parts) for parts in sent]
        arrived = start_all_to_all(flat, self._group, counts, lengths).finish()
        return torch.split(arrived, lengths)

    def _part(self, entry: Owned, rank: int) -> list[Span]:
        return self._spans[rank].get(entry.slot, [])

    def _joined(self, entry: Owned, flat: Tensor) -> Tensor:
        local = flat.view(entry.slot.shape)
        return local.clone() if self._joining is None else self._joining.gather(entry.slot.name, local).clone()

    def _cut(self, entry: Owned, whole: Tensor) -> Tensor:
        local = whole if self._joining is None else self._joining.local(entry.slot.name, whole)
        return local.detach().reshape(-1)


def _share_out(entries: Sequence[Owned], costs: Sequence[int], num_ranks: int) -> list[list[Owned]]:
    """Give the next largest to whom has least so far; each rank's stay in their order."""
    owners: dict[int, int] = {}
    load = [0] * num_ranks
    for index in sorted(range(len(entries)), key=lambda index: -costs[index]):
        owner = load.index(min(load))
        owners[index] = owner
        load[owner] += costs[index]
    return [[entry for index, entry in enumerate(entries) if owners[index] == rank] for rank in range(num_ranks)]


def _spans_by_slot(buckets: Iterable[Bucket], rank: int) -> dict[Slot, list[Span]]:
    found: dict[Slot, list[Span]] = {}
    for bucket in dict.fromkeys(buckets):
        for span in bucket.updated(rank):
            found.setdefault(span.slot, []).append(span)
    return found


def _weight(bucket: Bucket, span: Span) -> Tensor:
    return bucket.kept[span.at : span.at + span.length]


def _gradient(bucket: Bucket, span: Span) -> Tensor:
    return bucket.result[span.at : span.at + span.length]
