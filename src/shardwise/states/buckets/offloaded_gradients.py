"""The gradients of a bucket, where they live on the host.

    zero 0 and 1    in a backward       what went home before comes, is added to, and goes
                    in the last one     it is summed over the replicas before it goes
    zero 2 and 3    in every backward   gradients are summed to shards, which are added to what went home before

The device has memory for one backward of a bucket. The computation is the same as without offloading, in the same
order, so the sums are bitwise equal. The device computes the part of the norm before a gradient leaves. If a bucket is
updated in the backward, its final gradients stay on the device (`here`), and do not go to the host at all.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.ranks.exchange import Ticket
from shardwise.states.buckets.gradients import ScatteredGradients, WholeGradients
from shardwise.states.tiers.copy_streams import CopyStreams

#: Maps this rank's piece of a sum to the values that the norm needs.
Measure = Callable[[Tensor], list[Tensor]]


class HostGradients:
    """The gradients of one step that went to the host, in `numbers`; they are there after `sent`."""

    def __init__(self, length: int, like: Tensor, copies: CopyStreams, leaving: DeferredFree) -> None:
        self.numbers = copies.pinned((length,), like.dtype)
        self.sent: list[Event] = []
        #: The measurements of the last gradients sent.
        self.norms: list[Tensor] = []
        self.measure: Measure | None = None
        self._copies, self._leaving = copies, leaving

    def bring(self, into: Tensor) -> Event:
        """Start to copy them to the device."""
        return self._copies.to_device(into, self.numbers, [*self.sent, *self._copies.computed()])

    def follow(self, event: Event) -> None:
        """Order later computation after an event."""
        self._copies.follow(event)

    def send(self, numbers: Tensor, at: slice, own: Tensor | None = None) -> None:
        """Send values that are not needed here any more; `own` is this rank's piece of a sum in them."""
        if own is not None:
            self._note_norms(own)
        self._go(numbers, at, [])

    def add(self, more: Tensor) -> None:
        """Add values, on the device and beside the computation, to everything that is there."""
        total = torch.empty_like(more)
        arrives = self.bring(total)
        added = self._copies.run_after(partial(self._add, total, more), [*self._copies.computed(), arrives])
        self._go(total, slice(0, len(total)), added, more)

    def is_read(self, events: Sequence[Event]) -> None:
        """Record that they were read once these events are reached: later writes come after them."""
        self.sent = [*self.sent, *events]

    def wait(self) -> None:
        """Wait until everything sent has arrived."""
        for event in self.sent:
            event.wait()

    def _go(self, numbers: Tensor, at: slice, after: list[Event], *also: Tensor) -> None:
        event = self._copies.to_host(self.numbers[at], numbers, [*self.sent, *after])
        self.sent = [event]
        self._leaving.hold(event, numbers, *also)
        self._leaving.sweep()

    @torch.no_grad()
    def _add(self, total: Tensor, more: Tensor) -> None:
        total.add_(more)
        self._note_norms(total)

    @torch.no_grad()
    def _note_norms(self, own: Tensor) -> None:
        if self.measure is not None:
            self.norms = self.measure(own)


class OffloadedWholeGradients(WholeGradients):
    """Gradients that are summed at the end of a step (zero 0 and 1)."""

    host: HostGradients
    here: Tensor | None = None
    _lent: Tensor | None = None
    _arrives: Event | None = None
    _is_begun = False

    @property
    def home_length(self) -> int:
        """The number of elements on the host."""
        return self.layout.length

    def move_in(self, copies: CopyStreams, leaving: DeferredFree) -> None:
        """Allocate the host's memory."""
        self.host = HostGradients(self.home_length, self.parameters[0], copies, leaving)

    def begin(self) -> None:
        super().begin()
        self.here, self._lent, self._arrives, self._is_begun = None, None, None, False

    def fetch(self) -> None:
        if self._is_begun and self._lent is None:
            self._lent = self.parameters[0].detach().new_empty(self.layout.length)
            self._arrives = self.host.bring(self._lent)

    def flat(self, step: int) -> Tensor:  # noqa: ARG002 - there is one version of the weights
        """Return the gradients of this backward, accumulated into those that were sent earlier in the step."""
        self.fetch()
        if self._lent is None:
            self._lent = self._make()
        if self._arrives is not None:
            self.host.follow(self._arrives)
            self._arrives = None
        return self._lent

    def _take(self, number: int, parameter: nn.Parameter, step: int) -> None:
        slot, had = self.layout.slots[number], self.used_in(0)[number]
        place = self.flat(step)[slot.start : slot.stop].view(slot.shape)
        if parameter.grad is None:
            if not had:
                place.zero_()
        elif parameter.grad.data_ptr() != place.data_ptr():
            place.add_(parameter.grad) if had else place.copy_(parameter.grad)
            self.used_in(0)[number] = True
        parameter.grad = place

    def has_passed(self) -> bool:
        """Send them to the host, also those that were not announced."""
        told = [number for number, each in enumerate(self.parameters) if each.grad is not None]
        for number in told:
            self._take(number, self.parameters[number], 0)
        if self._lent is None:
            return False
        lent = self._let_go()
        self.host.send(lent, slice(0, len(lent)))
        self._is_begun = True
        return True

    def start(self, step: int = 0) -> None:
        super().start(step)
        for parameter in self.parameters:
            parameter.grad = None

    def settle(self) -> None:
        """Send the sum to the host; with zero=1, only this rank's piece."""
        self.wait()
        if self._lent is not None:
            lent, shard = self._let_go(), self.replicas.shard
            length = self.layout.shard_length
            at = slice(0, len(lent)) if self._to_all else slice(shard.rank * length, (shard.rank + 1) * length)
            self.host.send(lent[at], at, self._piece(lent))

    def hand_over(self, *, keeps: bool) -> None:
        """Make the sum available here, for an update; `keeps`: send it to the host too."""
        self.wait()
        if keeps or self._lent is None:
            self.here = self._lent
            self.settle()
        else:
            self.here = self._let_go()

    def finish(self, step: int) -> None:  # noqa: ARG002 - there is one version of the weights
        self.settle()

    @property
    def whole(self) -> Tensor:
        self.host.wait()
        return self.host.numbers

    @property
    def own(self) -> Tensor:
        return self._piece(self.whole)

    @property
    def num_bytes(self) -> int:
        return 0 if self._lent is None else self._lent.nbytes

    def _let_go(self) -> Tensor:
        """Free the memory on the device."""
        lent, self._lent = self.flat(0), None
        for parameter in self.parameters:
            parameter.grad = None
        return lent


class OffloadedScatteredGradients(ScatteredGradients):
    """Gradients that are summed to shards in every backward (zero 2 and 3)."""

    host: HostGradients
    #: Sums in progress, their memory, and whether they are a step's first.
    _sums: tuple[tuple[Ticket, Tensor, bool], ...] = ()

    def _make_shard(self) -> Tensor:
        return self.parameters[0].detach().new_empty(0)

    @property
    def home_length(self) -> int:
        """The number of elements on the host."""
        return self.layout.shard_length

    def move_in(self, copies: CopyStreams, leaving: DeferredFree) -> None:
        """Allocate the host's memory."""
        self.host = HostGradients(self.home_length, self._shard, copies, leaving)

    def _sum(self, lent: Tensor, *, is_first: bool) -> None:
        ticket = self._exchange.sum_to_shards(lent, self.replicas.shard, self._channel)
        self._sums = (*self._sums, (ticket, lent, is_first))

    def settle(self) -> None:
        """Send the sums in progress to the host."""
        sums, self._sums = self._sums, ()
        for ticket, lent, is_first in sums:
            ticket.wait()
            own = self._piece(lent).clone()
            self._pool.give_back(lent)
            self.host.send(own, slice(0, len(own)), own) if is_first else self.host.add(own)

    def hand_over(self, *, keeps: bool) -> None:  # noqa: ARG002 - they are on their way home in every backward
        """Make the sum available where it lives, for an update."""
        self.settle()

    def finish(self, step: int) -> None:  # noqa: ARG002 - there is one version of the weights
        """Make the sum of a step the result, summed over the copies too, now that it is complete."""
        self.settle()
        copies = self.replicas.copies
        if self._is_begun and copies.size == 1:
            return
        total = self._shard.new_zeros(self.layout.shard_length)
        if self._is_begun:
            self.host.follow(self.host.bring(total))
        self._exchange.sum_to_all(total, copies, self._channel + 1, follows=True).wait()
        self.host.send(total, slice(0, len(total)), total)

    @property
    def own(self) -> Tensor:
        self.host.wait()
        return self.host.numbers

    @property
    def num_bytes(self) -> int:
        return sum(lent.nbytes for _, lent, _ in self._sums)


#: Gradients of a bucket, if they live on the host.
OffloadedGradients = OffloadedWholeGradients | OffloadedScatteredGradients
