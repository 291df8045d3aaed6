"""The gradients of a bucket: held whole until the end of a step, or never whole (zero 2 and 3).

A gradient *arrives* when autograd has added it to its parameter. Held whole, it is moved into the bucket when it first
arrives, and later microbatches add to it there. Scattered, it goes into memory that is lent for one backward: as soon
as the bucket is full it is summed over the replicas, each rank adds its piece to its shard, and the memory is free.
"""

from collections.abc import Callable

from torch import Tensor, nn

from shardwise.ranks.buffer_pool import BufferPool
from shardwise.ranks.exchange import Exchange, Ticket
from shardwise.ranks.replicas import Replicas
from shardwise.states.buckets.flat_layout import FlatLayout, Span


def sum_over(flat: Tensor, replicas: Replicas, exchange: Exchange, channel: int) -> list[Ticket]:
    """Begin to make `flat` the sum over all replicas; the last ticket is that of the result."""
    if replicas.copies.size == 1:
        return [exchange.sum_to_all(flat, replicas.shard, channel)]
    return [
        exchange.sum_to_all(flat, group, channel + place, follows=True)
        for place, group in enumerate((replicas.shard, replicas.copies))
    ]


class Gradients:
    """What both ways have alike: which parameters had a gradient in this step, and the result."""

    def __init__(
        self, layout: FlatLayout, parameters: list[nn.Parameter], replicas: Replicas, exchange: Exchange, channel: int
    ) -> None:
        self.layout, self.parameters, self.replicas = layout, parameters, replicas
        self._exchange, self._channel = exchange, channel
        self.used = [False] * len(parameters)
        self._missing: set[int] = set()
        self._under_way: list[Ticket] = []
        self.expect()

    def begin(self) -> None:
        """Forget the last step's."""
        self.used = [False] * len(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None
        self.expect()

    def expect(self) -> None:
        """From now on every gradient is awaited once."""
        self._missing = set(range(len(self.parameters)))

    def fetch(self) -> None:
        """Have come what the next backward adds to: it is here."""

    def arrive(self, number: int) -> bool:
        """The gradient of a parameter has been added to. Returns whether it was the last that was awaited."""
        was_missing = number in self._missing
        self._missing.discard(number)
        self.used[number] = True
        return was_missing and not self._missing

    def has_passed(self) -> bool:
        """A backward that is not the last of a step has added all its gradients; whether any have left."""
        return False

    def hand_over(self, *, keeps: bool) -> None:  # noqa: ARG002 - they stay in any case
        """Have the sum here, to be updated with in the backward."""
        self.finish(0)

    def finish(self, step: int) -> None:
        """Let the sum of a step be the result."""
        raise NotImplementedError

    def settle(self) -> None:
        """Have sums that were begun go where they live: they are there already."""

    def wait(self) -> None:
        """Wait until all sums are there."""
        while self._under_way:
            self._under_way.pop(0).wait()

    @property
    def own(self) -> Tensor:
        """This rank's piece of the sum."""
        raise NotImplementedError

    def of(self, span: Span) -> Tensor:
        """This rank's piece of a parameter's gradient."""
        return self.own[span.at : span.at + span.length]


class WholeGradients(Gradients):
    """Held whole on every rank until the step (zero 0 and 1). `to_all`: every rank has the whole sum then.

    `parameter_of(name, step)` is what a step's gradients are added to, if not to the module's own parameters.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: list[nn.Parameter],
        replicas: Replicas,
        exchange: Exchange,
        channel: int,
        *,
        to_all: bool,
        parameter_of: Callable[[str, int], nn.Parameter] | None = None,
    ) -> None:
        super().__init__(layout, parameters, replicas, exchange, channel)
        self._to_all, self._parameter_of = to_all, parameter_of
        # By step: where weights have two versions, two steps are under way at a time.
        self._flats: dict[int, Tensor] = {}
        self._spare: list[Tensor] = []
        self._step = 0

    def begin(self) -> None:
        super().begin()
        self._spare += self._flats.values()
        self._flats.clear()

    def flat(self, step: int) -> Tensor:
        """The gradients of a step. Nothing is said of the numbers of those that have not arrived."""
        if step not in self._flats:
            self._flats[step] = self._spare.pop() if self._spare else self._make()
        return self._flats[step]

    def _make(self) -> Tensor:
        return self.parameters[0].detach().new_zeros(self.layout.length)

    def arrive(self, number: int) -> bool:
        parameter = self.parameters[number]
        self._take(number, parameter, 0)
        return super().arrive(number)

    def _take(self, number: int, parameter: nn.Parameter, step: int) -> None:
        """Move a gradient into the bucket, if it is not there yet."""
        slot = self.layout.slots[number]
        place = self.flat(step)[slot.start : slot.stop].view(slot.shape)
        if parameter.grad is None:
            place.zero_()
        elif parameter.grad.data_ptr() != place.data_ptr():
            place.copy_(parameter.grad)
            self.used[number] = True
        parameter.grad = place

    def start(self, step: int = 0) -> None:
        """All gradients of a step have been added: begin to sum them over the replicas."""
        for number, slot in enumerate(self.layout.slots):
            given = self._parameter_of(slot.name, step) if self._parameter_of is not None else self.parameters[number]
            self._take(number, given, step)
        self._step = step
        flat, shard, copies = self.flat(step), self.replicas.shard, self.replicas.copies
        if self._to_all:
            self._under_way += sum_over(flat, self.replicas, self._exchange, self._channel)
        else:
            self._under_way.append(self._exchange.sum_to_shards(flat, shard, self._channel))
            own = flat.view(shard.size, -1)[shard.rank]
            self._under_way.append(self._exchange.sum_to_all(own, copies, self._channel + 1, follows=True))

    def finish(self, step: int) -> None:
        """Let the sum of a step be the result."""
        self.wait()
        self._step = step

    @property
    def whole(self) -> Tensor:
        """The sum on every rank."""
        assert self._to_all, "each rank has its own piece only"
        return self._flats[self._step]

    @property
    def own(self) -> Tensor:
        return self._flats[self._step].view(self.replicas.shard.size, -1)[self.replicas.shard.rank]

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in [*self._flats.values(), *self._spare])


class ScatteredGradients(Gradients):
    """Summed over the replicas in each backward, and kept in shards (zero 2 and 3)."""

    def __init__(
        self,
        layout: FlatLayout,
        parameters: list[nn.Parameter],
        replicas: Replicas,
        exchange: Exchange,
        channel: int,
        *,
        pool: BufferPool,
    ) -> None:
        super().__init__(layout, parameters, replicas, exchange, channel)
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
            self.used[number] = True
            self._arrived.add(number)
        parameter.grad = None

    def start(self, step: int = 0) -> None:  # noqa: ARG002 - there is one version of the weights
        """A backward has added all its gradients: begin to sum them, and to add this rank's piece to its shard."""
        for number in range(len(self.parameters)):
            self._take(number)
        lent, self._lent = self._lent, None
        assert lent is not None, "a bucket has at least one parameter"
        self._arrived.clear()
        self._fill_gaps(lent)
        self._sum(lent, is_first=not self._is_begun)
        self._is_begun = True

    def _sum(self, lent: Tensor, *, is_first: bool) -> None:
        """Begin to sum what is in memory that was lent, and to add this rank's piece to its shard."""
        shard = self.replicas.shard

        def add() -> None:
            own = lent.view(shard.size, -1)[shard.rank]
            self._shard.copy_(own) if is_first else self._shard.add_(own)
            self._pool.give_back(lent)

        self._under_way.append(self._exchange.sum_to_shards(lent, shard, self._channel, add))

    def _fill_gaps(self, lent: Tensor) -> None:
        """Zeros between parameters: memory that was lent before has anything there."""
        ends = [0, *(slot.stop for slot in self.layout.slots)]
        starts = [*(slot.start for slot in self.layout.slots), self.layout.length]
        for end, start in zip(ends, starts, strict=True):
            if end < start:
                lent[end:start] = 0

    def finish(self, step: int) -> None:  # noqa: ARG002 - there is one version of the weights
        """Let the sum of a step be the result: over the copies too, now that it is complete."""
        if not self._is_begun:
            self._shard.zero_()
        copies = self.replicas.copies
        self._under_way.append(self._exchange.sum_to_all(self._shard, copies, self._channel + 1, follows=True))
        self.wait()

    @property
    def own(self) -> Tensor:
        return self._shard

    @property
    def num_bytes(self) -> int:
        return self._shard.numel() * self._shard.element_size()
