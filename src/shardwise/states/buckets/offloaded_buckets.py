"""The buckets of a rank that live on the host, as its host sees them: what moves in, how much, and what is updated."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from shardwise.cost.memory import DEFERRED_FREE_BYTES
from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.offloaded_gradients import HostGradients, OffloadedGradients, OffloadedWholeGradients
from shardwise.states.buckets.offloaded_weights import OffloadedWeights
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.residency import OffloadedWeight
from shardwise.states.tiers.staging import spare_bytes


class OffloadedPiece:
    """What a rank updates of a parameter that lives on the host. It is an `OffloadedWeight`."""

    def __init__(self, bucket: Bucket, number: int) -> None:
        self._bucket, self._number, self._piece = bucket, number, bucket.pieces[number]

    @property
    def host(self) -> Tensor:
        weights = _weights_of(self._bucket)
        return self._of(weights.kept if weights.master is None else weights.master.host)

    @property
    def gradient(self) -> Tensor:
        return self._of(host_gradients(self._bucket).numbers)

    @property
    def has_gradient(self) -> bool:
        return self._bucket.gives[self._number]

    @property
    def scale(self) -> float:
        return self._bucket.factor

    @property
    def sent(self) -> list[Event]:
        return host_gradients(self._bucket).sent

    @property
    def hands_over_weight(self) -> bool:
        return self._bucket.stays_for_update

    @property
    def hands_over_gradient(self) -> bool:
        return self._bucket.hands_over

    @property
    def gradient_here(self) -> Tensor | None:
        gradients = self._bucket.gradients
        here = gradients.here if isinstance(gradients, OffloadedWholeGradients) else None
        return None if here is None else self._of(here)

    def hold(self) -> bool:
        return _weights_of(self._bucket).hold_for_update()

    @property
    def weight_here(self) -> Tensor:
        return self._of(_weights_of(self._bucket).whole)

    def is_renewed(self, events: Sequence[Event]) -> None:
        host_gradients(self._bucket).is_read(events)
        if self.hands_over_weight:
            _weights_of(self._bucket).storage.is_written(events)
        else:
            _weights_of(self._bucket).is_renewed(events)

    def is_updated(self) -> None:
        bucket = self._bucket
        bucket.num_updated += 1
        if bucket.num_updated == sum(bucket.gives):
            if bucket.stays_for_update:
                _weights_of(bucket).is_updated()
            if isinstance(bucket.gradients, OffloadedWholeGradients):
                bucket.gradients.here = None

    def _of(self, host: Tensor) -> Tensor:
        """Its numbers of what the bucket has on the host: of all of it, or of this rank's piece."""
        span, bucket = self._piece.span, self._bucket
        first = 0
        if len(host) == bucket.layout.length and not bucket.updates_whole:
            first = bucket.sharing.rank * bucket.layout.shard_length
        return host[first + span.at : first + span.at + span.length].view(self._piece.weight.shape)


class HasWholes(Protocol):
    """Makes parameters whole, for optimizers, of pieces on the host: `optimizers/offloaded_owners.py`."""

    @property
    def offloaded(self) -> Mapping[nn.Parameter, OffloadedWeight]: ...

    @property
    def num_bytes(self) -> int: ...

    def move_in(self, copies: CopyStreams, leaving: DeferredFree) -> None: ...

    def close(self) -> None: ...


class OffloadedBuckets:
    """Buckets that live on the host. They are `OffloadedParameters`: nothing is there before `move_in`."""

    def __init__(self, buckets: Sequence[Bucket], owners: Sequence[HasWholes]) -> None:
        self.buckets, self._owners = [bucket for bucket in buckets if bucket.is_offloaded], owners
        self._pieces = {
            piece.weight: OffloadedPiece(bucket, number)
            for bucket in self.buckets
            for number, piece in enumerate(bucket.pieces)
        }

    @property
    def weights(self) -> Mapping[nn.Parameter, OffloadedWeight]:
        """What optimizers have of them: pieces, or wholes that are made of these."""
        wholes = {weight: each for owners in self._owners for weight, each in owners.offloaded.items()}
        return {**self._pieces, **wholes}

    @property
    def num_bytes(self) -> int:
        """What is on the host, once they have moved in."""
        masters = sum(bucket.master.nbytes for bucket in self.buckets if bucket.master is not None)
        wholes = sum(owners.num_bytes for owners in self._owners)
        return wholes + masters + sum(_num_numbers(bucket) * bucket.home.dtype.itemsize for bucket in self.buckets)

    def move_in(self, copies: CopyStreams) -> None:
        """Take the host's memory."""
        self._leaving, self._device, self._num_steps = DeferredFree(DEFERRED_FREE_BYTES), copies.device, 0
        for bucket in self.buckets:
            _weights_of(bucket).move_in(copies, self._leaving, bucket.master)
            if isinstance(bucket.gradients, OffloadedGradients):
                bucket.gradients.move_in(copies, self._leaving)
        for owners in self._owners:
            owners.move_in(copies, self._leaving)

    def begin_step(self) -> None:
        """A step begins. From the second one on, more memory may wait for its copies: part of what nobody needed."""
        self._num_steps += 1
        if self._num_steps == 2:
            self._leaving.grow(spare_bytes(self._device))

    def wait(self) -> None:
        """Wait until what is on the host is the newest."""
        for bucket in self.buckets:
            _weights_of(bucket).settle()
        self._leaving.wait()

    def close(self) -> None:
        """Leave all weights on the host for good: the module's parameters are those from now on."""
        self.wait()
        for bucket in self.buckets:
            _weights_of(bucket).stay_home()
        self._leaving.wait()
        for owners in self._owners:
            owners.close()


def host_gradients(bucket: Bucket) -> HostGradients:
    """Those of a bucket that lives on the host."""
    assert isinstance(bucket.gradients, OffloadedGradients), "its gradients live there too"
    return bucket.gradients.host


def _weights_of(bucket: Bucket) -> OffloadedWeights:
    assert isinstance(bucket.weights, OffloadedWeights), "it lives on the host"
    return bucket.weights


def _num_numbers(bucket: Bucket) -> int:
    """How many numbers are on the host, of weights and gradients in their own precision."""
    weights = bucket.layout.shard_length if bucket.weights.is_sharded else bucket.layout.length
    if isinstance(bucket.gradients, OffloadedGradients):
        return weights + bucket.gradients.home_length
    return weights
