"""Assemble whole parameters for optimizers that need them, if ranks hold pieces.

Each parameter has an owner among the ranks that share it. The owner gets the pieces of its gradient, has the whole
weight and its optimizer state, and sends pieces of the new weight back. Every rank owns about as much.

    rank 0   a1 b1 ─┬─> a1 a2 = a     step     a ─┬─> a1 b1
    rank 1   a2 b2 ─┴─> b1 b2 = b     step     b ─┴─> a2 b2

Under tensor parallelism a rank's whole is itself a part, and a rank has some of the experts; those are joined before
the step, on all such ranks alike.

If the ranks' pieces live on the host, the whole parameters do too, each with its gradient on its owner's host. Pieces
go to the owners and back through the device, a few parameters at a time, so that it never holds more than those.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.ranks.collectives import Group, start_all_to_all
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.flat_layout import Slot, Span
from shardwise.states.buckets.tensor_interface import Joining
from shardwise.states.scaling import multiply
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.swapped_storage import HostStorage

#: About this many bytes are exchanged at a time if pieces live on the host, and at least one parameter.
EXCHANGED_BYTES = 256 * 2**20

#: Returns some elements of a bucket of this rank, on the device.
Read = Callable[[Bucket, Span], Tensor]


class Owned(NamedTuple):
    """A parameter with an owner."""

    bucket: Bucket
    slot: Slot
    number: int


class Owners:
    """The parameters of some buckets that are sharded over one group."""

    def __init__(self, entries: Sequence[Owned], group: Group, costs: Sequence[int], joining: Joining | None) -> None:
        self._entries, self._group, self._costs, self._joining = entries, group, costs, joining
        self._of = _share_out(entries, costs, group.size)
        #: What each rank has of each parameter.
        self._spans = [_spans_by_slot((entry.bucket for entry in entries), rank) for rank in range(group.size)]
        self._weight_of = {entry: nn.Parameter(whole) for entry, whole in self._wholes(_weight)}

    @property
    def weights(self) -> list[nn.Parameter]:
        """The whole parameters that this rank owns."""
        return list(self._weight_of.values())

    @property
    def entries(self) -> Iterable[tuple[Owned, nn.Parameter]]:
        """The same with what they are."""
        return self._weight_of.items()

    @property
    def named(self) -> list[tuple[nn.Parameter, str, int]]:
        """The weights, their names, and where they start: all at their first element."""
        return [(weight, entry.slot.name, 0) for entry, weight in self._weight_of.items()]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over changes of the ranks' pieces from outside."""
        for entry, whole in self._wholes(_weight):
            self._weight_of[entry].copy_(whole)

    @torch.no_grad()
    def give(self, used: Callable[[Bucket], Sequence[bool]]) -> None:
        """Send the gradients to the owners."""
        for entry, whole in self._wholes(_gradient):
            weight = self._weight_of[entry]
            weight.grad = whole.to(weight.dtype) if used(entry.bucket)[entry.number] else None

    @torch.no_grad()
    def take_back(self) -> None:
        """Send the new weights to the ranks' pieces."""
        for some in self._turns():
            self._send_back(some, self._flattened(some[self._group.rank]))

    def _turns(self) -> Iterator[list[list[Owned]]]:
        """Yield the parameters to exchange at a time, by owner: all of them."""
        yield self._of

    def _wholes(self, read: Read) -> Iterator[tuple[Owned, Tensor]]:
        """Yield this rank's whole parameters, on the device."""
        for some in self._turns():
            for entry, part in self._to_owners(read, some):
                yield entry, self._joined(entry, part)

    def _flattened(self, entries: Sequence[Owned]) -> list[Tensor]:
        """Return this rank's part of the new weights that it owns."""
        for entry in entries:
            self._weight_of[entry].grad = None
        return [self._cut(entry, self._weight_of[entry]) for entry in entries]

    def _send_back(self, of: Sequence[Sequence[Owned]], wholes: Sequence[Tensor]) -> None:
        """Send the parameters of some owners, of which this rank's are `wholes`, to the ranks' pieces."""
        size, rank = self._group.size, self._group.rank
        bucket = next(entry for entries in of for entry in entries).bucket
        like = torch.empty(0, dtype=bucket.kept.dtype, device=bucket.key.device)
        sent = [[w[s.start : s.stop] for e, w in zip(of[rank], wholes, strict=True) for s in self._part(e, other)]
                for other in range(size)]  # fmt: skip
        lengths = [sum(s.length for e in of[other] for s in self._part(e, rank)) for other in range(size)]
        arrived = self._exchange(sent, lengths, like)
        for other in range(size):
            at = 0
            for entry in of[other]:
                for span in self._part(entry, rank):
                    entry.bucket.kept[span.at : span.at + span.length].copy_(arrived[other][at : at + span.length])
                    at += span.length

    def _to_owners(self, read: Read, of: Sequence[Sequence[Owned]]) -> list[tuple[Owned, Tensor]]:
        """Return this rank's parameters of some, whole and flattened, from the pieces that `read` returns on every
        rank."""
        size, rank = self._group.size, self._group.rank
        sent = [[read(e.bucket, s) for e in of[other] for s in self._part(e, rank)] for other in range(size)]
        lengths = [sum(s.length for e in of[rank] for s in self._part(e, other)) for other in range(size)]
        # A rank without a piece sends an empty tensor of the others' dtype.
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


class OwnedWeight:
    """A whole weight that lives on its owner's host. It is an `OffloadedWeight`."""

    #: Gradients are scaled before they are sent to owners.
    scale = 1.0
    #: Whole parameters are made for updates only: no backward uses them.
    hands_over_weight = hands_over_gradient = False
    gradient_here = None
    gradient: Tensor
    storage: HostStorage

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.has_gradient = False
        self.sent: list[Event] = []

    def move_in(self, copies: CopyStreams, leaving: DeferredFree) -> None:
        """Allocate the host's memory, and free the device's."""
        self.storage = HostStorage(self.weight.detach(), copies, leaving)
        self.gradient = copies.pinned(self.weight.shape, self.weight.dtype)

    @property
    def host(self) -> Tensor:
        return self.storage.host

    @property
    def weight_here(self) -> Tensor:
        return self.storage.device

    def hold(self) -> bool:
        raise NotImplementedError("nothing is handed over")

    def is_updated(self) -> None:
        """Do nothing: nothing waits for the update."""

    def is_renewed(self, events: Sequence[Event]) -> None:
        self.storage.is_renewed(events)
        # Later writes to it come after this read.
        self.sent = [*self.sent, *events]


class OffloadedOwners(Owners):
    """The parameters of some buckets that live on the host and are sharded over one group."""

    _copies: CopyStreams
    _leaving: DeferredFree

    def __init__(self, entries: Sequence[Owned], group: Group, costs: Sequence[int], joining: Joining | None) -> None:
        super().__init__(entries, group, costs, joining)
        self.offloaded = {weight: OwnedWeight(weight) for weight in self.weights}

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole parameters on the host, once they have moved there."""
        return sum(2 * each.nbytes for each in self.weights)

    def move_in(self, copies: CopyStreams, leaving: DeferredFree) -> None:
        """Allocate the host's memory."""
        self._copies, self._leaving = copies, leaving
        for each in self.offloaded.values():
            each.move_in(copies, leaving)

    @torch.no_grad()
    def refresh(self) -> None:
        for entry, whole in self._wholes(_weight):
            offloaded = self.offloaded[self._weight_of[entry]]
            offloaded.storage.wait()
            offloaded.host.copy_(whole)

    @torch.no_grad()
    def give(self, used: Callable[[Bucket], Sequence[bool]]) -> None:
        for entry, whole in self._wholes(_gradient):
            offloaded = self.offloaded[self._weight_of[entry]]
            offloaded.has_gradient = used(entry.bucket)[entry.number]
            if offloaded.has_gradient:
                numbers = whole.to(offloaded.weight.dtype).contiguous()
                offloaded.sent = [self._copies.to_host(offloaded.gradient, numbers, offloaded.sent)]
                self._leaving.hold(offloaded.sent[0], numbers)
                self._leaving.sweep()

    def close(self) -> None:
        """Leave the whole parameters on the host for good."""
        for each in self.offloaded.values():
            each.storage.wait()
            each.weight.data = each.host

    def _flattened(self, entries: Sequence[Owned]) -> list[Tensor]:
        mine = [(entry, self._weight_of[entry]) for entry in entries]
        for _, weight in mine:
            self.offloaded[weight].storage.start()
        wholes = []
        for entry, weight in mine:
            storage = self.offloaded[weight].storage
            storage.follow()
            wholes.append(self._cut(entry, weight).clone())
            storage.leave()
        return wholes

    def _turns(self) -> Iterator[list[list[Owned]]]:
        """Yield the parameters in groups of about this many bytes, by owner."""
        turn: list[Owned] = []
        num_bytes = 0
        for entry, cost in zip(self._entries, self._costs, strict=True):
            size = cost * entry.bucket.key.dtype.itemsize
            if turn and num_bytes + size > EXCHANGED_BYTES:
                yield self._by_owner(turn)
                turn, num_bytes = [], 0
            turn.append(entry)
            num_bytes += size
        if turn:
            yield self._by_owner(turn)

    def _by_owner(self, some: Sequence[Owned]) -> list[list[Owned]]:
        return [[entry for entry in mine if entry in some] for mine in self._of]


def _share_out(entries: Sequence[Owned], costs: Sequence[int], num_ranks: int) -> list[list[Owned]]:
    """Give the next largest to the rank with the least so far; each rank's stay in order."""
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
    return bucket.kept[span.at : span.at + span.length].to(bucket.key.device)


def _gradient(bucket: Bucket, span: Span) -> Tensor:
    """Return the gradient of a span, scaled here if it lives on the host."""
    numbers = bucket.result[span.at : span.at + span.length]
    return multiply(numbers.to(bucket.key.device, copy=True), bucket.factor) if bucket.is_offloaded else numbers
