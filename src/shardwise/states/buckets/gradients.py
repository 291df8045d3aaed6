"""The gradients of a bucket: whole until the end of a step, scattered (zero 2 and 3), or local.

A gradient *arrives* when autograd has added it to its parameter. A whole gradient is moved into the bucket when it
first arrives, and later microbatches accumulate there. A scattered gradient goes into a buffer borrowed for one
backward: as soon as the bucket is full, it is summed over the replicas, each rank adds its piece to its shard, and the
buffer is returned. If only one replica has a parameter, nothing is summed over replicas: the gradient is local, and
stays where autograd put it.

If weights have two versions, two steps are in progress at a time: one whose gradients are being summed, and the next,
whose backwards have begun. So the data of a step is kept by its number, until the step is finished:

    begin     of the step after next     the result of the last finished step is forgotten; steps under way are not
    start     all gradients are there    a run of memory for the step, and its sums
    finish                               waits for the sums of this step alone; they are the result
    pop_used                             which parameters had a gradient in the step
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.ranks.collectives import Group
from shardwise.ranks.exchange import BufferPool, Exchange, Ticket
from shardwise.ranks.mesh import Replicas
from shardwise.states.buckets.flat_layout import BucketSpec


def sum_over(flat: Tensor, replicas: Replicas, exchange: Exchange, channel: int) -> list[Ticket]:
    """Start to sum `flat` over all replicas; the last ticket is that of the result."""
    if replicas.copies.size == 1:
        return [exchange.sum_to_all(flat, replicas.shard, channel)]
    return [
        exchange.sum_to_all(flat, group, channel + place, follows=True)
        for place, group in enumerate((replicas.shard, replicas.copies))
    ]


class Gradients:
    """The common part of all kinds: which parameters had a gradient in a step, and which sums are in progress.

    Without versions of the weights there is one step at a time, with number 0.
    """

    def __init__(self, spec: BucketSpec) -> None:
        self.layout, self.parameters, self.replicas = spec.layout, spec.parameters, spec.replicas
        self._parameter_of = spec.parameter_of
        self._exchange, self._channel = spec.exchange, spec.channel + 1
        self._used: dict[int, list[bool]] = {}
        self._under_way: defaultdict[int, list[Ticket]] = defaultdict(list)
        self._missing: set[int] = set()
        #: Called with this rank's own gradients of a step, or of a backward, before they are summed with others'.
        self.look: Callable[[Tensor], None] | None = None
        self.expect()

    def begin(self) -> None:
        """Drop the gradients of the last step."""
        for parameter in self.parameters:
            parameter.grad = None
        if self._parameter_of is None:  # Otherwise another step is in progress.
            self._used.clear()
            self._under_way.clear()
        self.expect()

    def expect(self) -> None:
        """Expect every gradient once from now on."""
        self._missing = set(range(len(self.parameters)))

    def fetch(self) -> None:
        """Bring what the next backward accumulates into to the device; nothing to do here."""

    def arrive(self, number: int) -> bool:
        """Record that a gradient was accumulated. Return whether it was the last one expected."""
        was_missing = number in self._missing
        self._missing.discard(number)
        self.used_in(0)[number] = True
        return was_missing and not self._missing

    def used_in(self, step: int) -> list[bool]:
        """Whether each parameter has had a gradient in a step."""
        return self._used.setdefault(step, [False] * len(self.parameters))

    def pop_used(self, step: int) -> list[bool]:
        """Return and forget which parameters had a gradient in a finished step: the next may reuse its number."""
        return self._used.pop(step, [False] * len(self.parameters))

    def start(self, step: int = 0) -> None:
        """Start to sum the gradients of a step, or of a backward, once all are there. Local ones are not summed."""

    def has_passed(self) -> bool:
        """Handle a backward that is not the last of a step; return whether any gradients left the device."""
        return False

    def hand_over(self, *, keeps: bool) -> None:  # noqa: ARG002 - they stay in any case
        """Make the sum available on the device, for an update in the backward."""
        self.finish(0)

    def finish(self, step: int) -> None:
        """Make the sum of a step the result."""
        raise NotImplementedError

    def settle(self) -> None:
        """Send sums in progress to where they live; they are there already."""

    def wait(self, step: int = 0) -> None:
        """Wait for all sums of a step."""
        for ticket in self._under_way.pop(step, ()):
            ticket.wait()

    @property
    def own(self) -> Tensor:
        """This rank's piece of the sum."""
        raise NotImplementedError

    def _piece(self, flat: Tensor) -> Tensor:
        """Return this rank's piece of memory that replicas share."""
        return flat.view(self.replicas.shard.size, -1)[self.replicas.shard.rank]

    def _targets(self, step: int) -> list[nn.Parameter]:
        """Return the parameters to which the gradients of a step were added."""
        if self._parameter_of is None:
            return self.parameters
        return [self._parameter_of(slot.name, step) for slot in self.layout.slots]


class WholeGradients(Gradients):
    """Kept whole on every rank until the step (zero 0 and 1). `to_all`: then every rank has the whole sum."""

    def __init__(self, spec: BucketSpec, *, to_all: bool) -> None:
        super().__init__(spec)
        self._to_all = to_all
        # Memory by step, for steps in progress; then that of the result, and spare ones.
        self._flats: dict[int, Tensor] = {}
        self._result: list[Tensor] = []
        self._spare: list[Tensor] = []

    def begin(self) -> None:
        super().begin()
        self._spare += self._result
        self._result = []
        if self._parameter_of is None:
            self._spare += self._flats.values()
            self._flats.clear()

    def flat(self, step: int) -> Tensor:
        """Return the gradients of a step. The values of gradients that have not arrived are undefined."""
        if step not in self._flats:
            self._flats[step] = self._spare.pop() if self._spare else self._make()
        return self._flats[step]

    def _make(self) -> Tensor:
        return self.parameters[0].detach().new_zeros(self.layout.length)

    def arrive(self, number: int) -> bool:
        self._take(number, self.parameters[number], 0)
        return super().arrive(number)

    def _take(self, number: int, parameter: nn.Parameter, step: int) -> None:
        """Move a gradient into the bucket, if it is not there yet."""
        slot = self.layout.slots[number]
        place = self.flat(step)[slot.start : slot.stop].view(slot.shape)
        if parameter.grad is None:
            place.zero_()
        elif parameter.grad.data_ptr() != place.data_ptr():
            place.copy_(parameter.grad)
            self.used_in(step)[number] = True
        parameter.grad = place

    def start(self, step: int = 0) -> None:
        """Start to sum the gradients of a step over the replicas, once all are there."""
        for number, given in enumerate(self._targets(step)):
            self._take(number, given, step)
        flat, shard, copies = self.flat(step), self.replicas.shard, self.replicas.copies
        if self.look is not None:
            self.look(flat)
        if self._to_all:
            self._under_way[step] += sum_over(flat, self.replicas, self._exchange, self._channel)
        else:
            self._under_way[step] += [
                self._exchange.sum_to_shards(flat, shard, self._channel),
                self._exchange.sum_to_all(self._piece(flat), copies, self._channel + 1, follows=True),
            ]

    def finish(self, step: int) -> None:
        """Make the sum of a step the result."""
        self.wait(step)
        self._spare += self._result
        self._result = [self._flats.pop(step)]

    @property
    def whole(self) -> Tensor:
        """The sum on every rank."""
        assert self._to_all, "each rank has its own piece only"
        return self._result[0]

    @property
    def own(self) -> Tensor:
        return self._piece(self._result[0])

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in [*self._flats.values(), *self._result, *self._spare])


class ScatteredGradients(Gradients):
    """Summed over the replicas in each backward, and kept in shards (zero 2 and 3)."""

    def __init__(self, spec: BucketSpec, *, pool: BufferPool) -> None:
        super().__init__(spec)
        self._pool = pool
        self._lent: Tensor | None = None
        self._arrived: set[int] = set()
        self._shard = self._make_shard()
        self._is_begun = False

    def _make_shard(self) -> Tensor:
        return self.parameters[0].detach().new_zeros(self.layout.shard_length)

    def begin(self) -> None:
        super().begin()
        self._is_begun = False

    def arrive(self, number: int) -> bool:
        self._take(number)
        return super().arrive(number)

    def _take(self, number: int) -> None:
        """Move a gradient out of its parameter."""
        parameter, slot = self.parameters[number], self.layout.slots[number]
        if self._lent is None:
            self._lent = self._pool.take(self.layout.length, self._shard)
        place = self._lent[slot.start : slot.stop].view(slot.shape)
        if parameter.grad is None:
            if number not in self._arrived:
                place.zero_()
        elif number in self._arrived:
            place += parameter.grad
        else:
            place.copy_(parameter.grad)
            self.used_in(0)[number] = True
            self._arrived.add(number)
        parameter.grad = None

    def start(self, step: int = 0) -> None:  # noqa: ARG002 - there is one version of the weights
        """Start to sum the gradients of a backward, and to add this rank's piece to its shard."""
        for number in range(len(self.parameters)):
            self._take(number)
        lent, self._lent = self._lent, None
        assert lent is not None, "a bucket has at least one parameter"
        self._arrived.clear()
        self._fill_gaps(lent)
        if self.look is not None:
            self.look(lent)
        self._sum(lent, is_first=not self._is_begun)
        self._is_begun = True

    def _sum(self, lent: Tensor, *, is_first: bool) -> None:
        """Start to sum a borrowed buffer, and to add this rank's piece to its shard."""

        def add() -> None:
            own = self._piece(lent)
            self._shard.copy_(own) if is_first else self._shard.add_(own)
            self._pool.give_back(lent)

        self._under_way[0].append(self._exchange.sum_to_shards(lent, self.replicas.shard, self._channel, add))

    def _fill_gaps(self, lent: Tensor) -> None:
        """Write zeros between parameters: a borrowed buffer has old values there."""
        ends = [0, *(slot.stop for slot in self.layout.slots)]
        starts = [*(slot.start for slot in self.layout.slots), self.layout.length]
        for end, start in zip(ends, starts, strict=True):
            if end < start:
                lent[end:start] = 0

    def finish(self, step: int) -> None:  # noqa: ARG002 - there is one version of the weights
        """Make the sum of a step the result, summed over the copies too, now that it is complete."""
        if not self._is_begun:
            self._shard.zero_()
        copies = self.replicas.copies
        self._under_way[0].append(self._exchange.sum_to_all(self._shard, copies, self._channel + 1, follows=True))
        self.wait()

    @property
    def own(self) -> Tensor:
        return self._shard

    @property
    def num_bytes(self) -> int:
        return self._shard.nbytes


class LocalGradients(Gradients):
    """The gradients of parameters that only one replica has. Each stays where autograd put it.

    Gradients of tied stages on several ranks are summed tensor by tensor, starting as soon as a rank has its part. If
    weights have two versions, gradients are moved to the module's own parameters before the step is taken
    (`execution/weight_stash.py`), and stay there.
    """

    def __init__(self, spec: BucketSpec) -> None:
        super().__init__(spec)
        #: By step, the number of stages of a tie on which each was used.
        self._flags: dict[int, Tensor] = {}

    @torch.no_grad()
    def start_sum(self, group: Group, step: int) -> None:
        """Start to sum them over the stages of a tie. A rank without a gradient still takes part in the sum.

        A flag for each is sent after them: a parameter that no stage used has no gradient, as on one device.
        """
        if step in self._under_way:
            return
        targets = self._targets(step)
        flags = torch.tensor([float(each.grad is not None) for each in targets], device=targets[0].device)
        for number, each in enumerate(targets):
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            self._under_way[step].append(self._exchange.sum_to_all(each.grad, group, self._channel + number))
        self._under_way[step].append(self._exchange.sum_to_all(flags, group, self._channel + len(targets)))
        self._flags[step] = flags

    def finish(self, step: int) -> None:
        """Make the gradients of a step, or their sums, the result."""
        self.wait(step)
        targets, flags = self._targets(step), self._flags.pop(step, None)
        if flags is not None:
            for each, count in zip(targets, flags.tolist(), strict=True):
                if not count:
                    each.grad = None
        if self.look is not None:
            for gradient in self.found:
                self.look(gradient)
        if step not in self._used:
            self._used[step] = [each.grad is not None for each in targets]

    def find(self, number: int) -> Tensor | None:
        """Return the gradient of a parameter, if it has one."""
        return self.parameters[number].grad

    @property
    def found(self) -> list[Tensor]:
        """Return the gradients that exist."""
        return [each.grad for each in self.parameters if each.grad is not None]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.found)
