"""Complete the gradients of a step: sum them over all contributors, measure and scale them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.ranks.collectives import Group
from shardwise.ranks.exchange import Exchange, Ticket
from shardwise.ranks.mesh import Replicas
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.flat_layout import Slot
from shardwise.states.buckets.gradients import sum_over
from shardwise.states.buckets.make import ParameterOwners
from shardwise.states.buckets.tensor_interface import TensorInterface, sum_partial
from shardwise.states.buckets.ties import Tie, TieSums
from shardwise.states.scaling import multiply_all
from shardwise.torch_private import foreach_norm

# Channels of flags. Ties have the same numbers on ranks with different replicas.
_REPLICAS, _TIES = 16_384, 30_000

#: Start and end in this rank's piece of a bucket, and the counted indices there.
Part = tuple[int, int, Tensor | None]


class StepGradients:
    """The gradients of a rank's trained buckets. `done` are buckets that were already updated in this step."""

    def __init__(self, buckets: Sequence[Bucket], owners: ParameterOwners, exchange: Exchange) -> None:
        self._local = [bucket.local for bucket in buckets if bucket.local is not None]
        self._summed = [bucket for bucket in buckets if bucket.local is None]
        self._tensor = owners.tensor
        self.ties = TieSums(owners.ties, buckets, exchange)
        self.norm = GradientNorm(buckets, self.ties.is_counted, owners.tensor)
        self._unused = UnusedParameters(buckets, owners.ties, exchange)
        #: Which parameters of each bucket had a gradient on any replica in the last finished step.
        self.used: Mapping[Bucket, list[bool]] = {}

    @torch.no_grad()
    def finish(self, step: int, done: Collection[Bucket]) -> None:
        """Wait until this rank's gradients of a step are the sums over all replicas, and over tied stages."""
        self.ties.finish_local(step)
        self._unused.start(step)
        for bucket in self._summed:
            if bucket not in done:
                bucket.trained.finish(step)
        self.ties.sum_shards()
        partial = [bucket for bucket in self._summed if bucket.key.is_partial]
        if self._tensor is not None and partial:
            sum_partial(self._tensor, partial)
        self.used = self._unused.read()

    @torch.no_grad()
    def scale(self, factor: float, done: Collection[Bucket]) -> None:
        """Scale them."""
        multiply_all([each for local in self._local for each in local.found], factor)
        for bucket in self._summed:
            if bucket not in done:
                bucket.scale(factor)

    def close(self) -> None:
        """Release the groups."""
        self._unused.close()


class GradientNorm:
    """A rank's part of the gradient norm: over all ranks, every element of the model is counted once.

    Each bucket is counted by piece, on one of its copies and on one of its tied ranks.
    """

    def __init__(
        self, buckets: Sequence[Bucket], is_counted: Callable[[Bucket], bool], tensor: TensorInterface | None
    ) -> None:
        self._parts: list[tuple[Bucket, list[Part]]] = []
        for bucket in buckets:
            replicas = bucket.key.replicas
            if bucket.gradients is None or replicas.copies.rank or not is_counted(bucket):
                continue
            parts: list[Part] = []
            for span in bucket.layout.spans(replicas.shard.rank):
                kept = _counted_places(tensor, span.slot)
                if kept is not None:
                    kept = kept[(kept >= span.start) & (kept < span.stop)] - span.start
                if kept is None or len(kept):
                    parts.append((span.at, span.at + span.length, kept))
            self._parts.append((bucket, parts))

        every = [bucket for bucket, parts in self._parts if parts]
        wide = any(each.key.dtype in (torch.float64, torch.complex128) for each in every)
        self._wide = torch.float64 if wide else torch.float32

    def measure_on_the_way(self) -> None:
        """Measure gradients on the device before they go to the host."""
        for bucket, parts in self._parts:
            if bucket.is_offloaded:
                bucket.host_gradients.measure = partial(self._norms, parts)

    @torch.no_grad()
    def square(self) -> Tensor:
        """Return the sum of squares of this rank's part, on its device."""
        local = [bucket.local for bucket, _ in self._parts if bucket.local is not None]
        norms = self._all_norms([each for one in local for each in one.found])
        for bucket, parts in self._parts:
            if bucket.is_offloaded:
                bucket.host_gradients.wait()
                norms += bucket.host_gradients.norms
            elif bucket.local is None:
                norms += self._norms(parts, bucket.trained.own)
        return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)

    def _norms(self, parts: Sequence[Part], own: Tensor) -> list[Tensor]:
        """Return the norm of each part of this rank's piece of a bucket."""
        return self._all_norms([own[start:stop] if at is None else own[start:stop][at] for start, stop, at in parts])

    def _all_norms(self, chosen: list[Tensor]) -> list[Tensor]:
        # The norm of complex numbers is that of their real and imaginary parts.
        real = [torch.view_as_real(each) if each.is_complex() else each for each in chosen]
        return foreach_norm(real, self._wide) if real else []


class UnusedParameters:
    """Find which parameters had a gradient in a step, on any replica.

    The optimizer skips a parameter without a gradient on all of them, as on one device: no decay, no momentum. A
    replica cannot know that by itself, so a flag for each parameter is summed. This traffic is not counted: it is not
    part of the model.
    """

    def __init__(self, buckets: Sequence[Bucket], ties: Sequence[Tie], exchange: Exchange) -> None:
        self._exchange = exchange
        by_group: dict[Replicas, list[Bucket]] = {}
        #: Buckets of only one replica, which needs no exchange.
        self._alone = [bucket for bucket in buckets if bucket.key.replicas.count == 1]
        for bucket in buckets:
            if bucket.key.replicas.count > 1:
                by_group.setdefault(bucket.key.replicas, []).append(bucket)
        self._groups = [
            (Replicas(shard=_uncounted(replicas.shard), copies=_uncounted(replicas.copies)), mine)
            for replicas, mine in by_group.items()
        ]
        self._ties = [
            (
                number,
                _uncounted(tie.group),
                [bucket for bucket in buckets if bucket.key.tie == number and bucket.local is None],
            )
            for number, tie in enumerate(ties)
        ]
        self._used: dict[Bucket, list[bool]] = {}
        self._asked: list[tuple[Tensor, list[Ticket]]] = []

    def start(self, step: int) -> None:
        """Start to sum the flags over the replicas."""
        self._used, self._asked = {bucket: bucket.trained.pop_used(step) for bucket in self._alone}, []
        for number, (replicas, buckets) in enumerate(self._groups):
            flags = _flags([bucket.trained.pop_used(step) for bucket in buckets], buckets[0].key.device)
            self._asked.append((flags, sum_over(flags, replicas, self._exchange, _REPLICAS + 2 * number)))

    def read(self) -> Mapping[Bucket, list[bool]]:
        """Return the results, with those of tied stages."""
        used = self._used
        for (flags, tickets), (_, buckets) in zip(self._asked, self._groups, strict=True):
            for ticket in tickets:
                ticket.wait()
            used |= _answers(flags, buckets)
        for number, group, buckets in self._ties:
            if buckets and group.size > 1:
                flags = _flags([used[bucket] for bucket in buckets], buckets[0].key.device)
                self._exchange.sum_to_all(flags, group, _TIES + number).wait()
                used |= _answers(flags, buckets)
        return used

    def close(self) -> None:
        """Release the groups."""
        self._groups.clear()
        self._ties.clear()


def _counted_places(tensor: TensorInterface | None, slot: Slot) -> Tensor | None:
    """Return the indices of a parameter that this rank counts, if each is counted once; None for all of them."""
    if tensor is None:
        return None
    numbers = torch.arange(slot.shape.numel()).view(slot.shape)
    kept = tensor.counted(slot.name, numbers).reshape(-1)
    return None if len(kept) == numbers.numel() else kept


def _uncounted(group: Group) -> Group:
    """Return a group of the same ranks with a separate count of traffic."""
    return Group(group.handle)


def _flags(used: Sequence[Sequence[bool]], device: torch.device) -> Tensor:
    return torch.tensor([float(flag) for flags in used for flag in flags], device=device)


def _answers(flags: Tensor, buckets: Sequence[Bucket]) -> dict[Bucket, list[bool]]:
    answers = iter(flags.tolist())
    return {bucket: [next(answers) > 0 for _ in bucket.layout.slots] for bucket in buckets}
