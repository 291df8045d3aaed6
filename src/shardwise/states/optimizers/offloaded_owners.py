"""Whole parameters for optimizers that must see them so, where the ranks' pieces live on the host.

The wholes live there too, each with its gradient on its owner's host. Pieces go to the owners and come back by way of
the device, a few parameters at a time, so that it never holds more of them than that.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.ranks.collectives import Group
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.flat_layout import Span
from shardwise.states.buckets.tensor_interface import Joining
from shardwise.states.optimizers.owners import Owned, Owners, Read
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.swapped_storage import HostStorage

#: About so many bytes are exchanged at a time, and at least one parameter.
EXCHANGED_BYTES = 256 * 2**20


class OwnedWeight:
    """A whole weight that lives on its owner's host. It is an `OffloadedWeight`."""

    #: Gradients are multiplied before they go to owners.
    scale = 1.0
    #: Wholes are made for updates alone: no backward has them.
    hands_over_weight = hands_over_gradient = False
    gradient_here = None
    gradient: Tensor
    storage: HostStorage

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self.has_gradient = False
        self.sent: list[Event] = []

    def move_in(self, copies: CopyStreams, leaving: DeferredFree) -> None:
        """Take the host's memory, and give back the device's."""
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
        """Nothing waits for that."""

    def is_renewed(self, events: Sequence[Event]) -> None:
        self.storage.is_renewed(events)
        # What goes there next comes after it was read.
        self.sent = [*self.sent, *events]


class OffloadedOwners(Owners):
    """The parameters of some buckets that live on the host, and are shared out over one group."""

    _copies: CopyStreams
    _leaving: DeferredFree

    def __init__(self, entries: Sequence[Owned], group: Group, costs: Sequence[int], joining: Joining | None) -> None:
        super().__init__(entries, group, costs, joining)
        self._entries, self._costs = list(entries), list(costs)
        self.offloaded = {weight: OwnedWeight(weight) for weight in self.weights}
        self._weight_of = dict(zip(self._mine, self.offloaded.values(), strict=True))

    @property
    def num_bytes(self) -> int:
        """What is on the host of the wholes, once they have moved in."""
        return sum(2 * each.nbytes for each in self.weights)

    def move_in(self, copies: CopyStreams, leaving: DeferredFree) -> None:
        """Take the host's memory."""
        self._copies, self._leaving = copies, leaving
        for each in self.offloaded.values():
            each.move_in(copies, leaving)

    @torch.no_grad()
    def refresh(self) -> None:
        for entry, whole in self._wholes(_weight):
            offloaded = self._weight_of[entry]
            offloaded.storage.wait()
            offloaded.host.copy_(whole)

    @torch.no_grad()
    def give(self, used: Callable[[Bucket], Sequence[bool]]) -> None:
        for entry, whole in self._wholes(_gradient):
            offloaded = self._weight_of[entry]
            offloaded.has_gradient = used(entry.bucket)[entry.number]
            if offloaded.has_gradient:
                numbers = whole.to(offloaded.weight.dtype).contiguous()
                offloaded.sent = [self._copies.to_host(offloaded.gradient, numbers, offloaded.sent)]
                self._leaving.hold(offloaded.sent[0], numbers)
                self._leaving.sweep()

    @torch.no_grad()
    def take_back(self) -> None:
        for some in self._turns():
            mine = [(entry, self._weight_of[entry]) for entry in some[self._group.rank]]
            for _, offloaded in mine:
                offloaded.storage.start()
            wholes = []
            for entry, offloaded in mine:
                offloaded.storage.follow()
                wholes.append(self._cut(entry, offloaded.weight).clone())
                offloaded.storage.leave()
            self._send_back(some, wholes)

    def close(self) -> None:
        """Leave the wholes on the host for good."""
        for each in self.offloaded.values():
            each.storage.wait()
            each.weight.data = each.host

    def _wholes(self, read: Read) -> Iterator[tuple[Owned, Tensor]]:
        """This rank's parameters, whole, on the device: a few at a time."""
        for some in self._turns():
            for entry, part in self._to_owners(read, some):
                yield entry, self._joined(entry, part)

    def _turns(self) -> Iterator[list[list[Owned]]]:
        """The parameters in turns of about so many bytes, each by owner."""
        turn: list[Owned] = []
        num_bytes = 0
        for entry, cost in zip(self._entries, self._costs, strict=True):
            size = cost * entry.bucket.home.dtype.itemsize
            if turn and num_bytes + size > EXCHANGED_BYTES:
                yield self._by_owner(turn)
                turn, num_bytes = [], 0
            turn.append(entry)
            num_bytes += size
        if turn:
            yield self._by_owner(turn)

    def _by_owner(self, some: Sequence[Owned]) -> list[list[Owned]]:
        return [[entry for entry in mine if entry in some] for mine in self._of]


def _weight(bucket: Bucket, span: Span) -> Tensor:
    return bucket.kept[span.at : span.at + span.length].to(bucket.home.device)


def _gradient(bucket: Bucket, span: Span) -> Tensor:
    """Multiplied as it is where nothing lives on the host."""
    numbers = bucket.result[span.at : span.at + span.length]
    return numbers.to(bucket.home.device, copy=True).mul_(bucket.factor)
