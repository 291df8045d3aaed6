"""The data that a rank keeps on the host, by its plan: weights, optimizer state, and saved activations."""

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.cluster.local import available_bytes
from shardwise.cost.memory import DEFERRED_FREE_BYTES
from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.planner.host_memory import check_host_memory
from shardwise.planner.plan import Offload, Plan
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.offloaded_gradients import OffloadedGradients, OffloadedWholeGradients
from shardwise.states.compact_adamw import check_on_host
from shardwise.states.data_parallel import DataParallel
from shardwise.states.tiers.activation_offload import ActivationOffload
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.tiers.residency import OffloadedWeight
from shardwise.states.tiers.staging import spare_bytes

#: Returns the objects of all ranks of the world.
Gather = Callable[[Any], list[Any]]


class OffloadedPiece:
    """This rank's part of a parameter on the host, which it updates. It is an `OffloadedWeight`."""

    def __init__(self, bucket: Bucket, number: int) -> None:
        self._bucket, self._number, self._piece = bucket, number, bucket.pieces[number]

    @property
    def host(self) -> Tensor:
        weights = self._bucket.host_weights
        return self._of(weights.kept if weights.master is None else weights.master.host)

    @property
    def gradient(self) -> Tensor:
        return self._of(self._bucket.host_gradients.numbers)

    @property
    def has_gradient(self) -> bool:
        return self._bucket.gives[self._number]

    @property
    def scale(self) -> float:
        return self._bucket.factor

    @property
    def sent(self) -> list[Event]:
        return self._bucket.host_gradients.sent

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
        return self._bucket.host_weights.hold_for_update()

    @property
    def weight_here(self) -> Tensor:
        return self._of(self._bucket.host_weights.whole)

    def is_renewed(self, events: Sequence[Event]) -> None:
        self._bucket.host_gradients.is_read(events)
        if self.hands_over_weight:
            self._bucket.host_weights.storage.is_written(events)
        else:
            self._bucket.host_weights.is_renewed(events)

    def is_updated(self) -> None:
        bucket = self._bucket
        bucket.num_updated += 1
        if bucket.num_updated == sum(bucket.gives):
            if bucket.stays_for_update:
                bucket.host_weights.is_updated()
            if isinstance(bucket.gradients, OffloadedWholeGradients):
                bucket.gradients.here = None

    def _of(self, host: Tensor) -> Tensor:
        """Return this piece's elements of the bucket's host memory, which has the whole bucket or this rank's piece."""
        span, bucket = self._piece.span, self._bucket
        first = 0
        if len(host) == bucket.layout.length and not bucket.updates_whole:
            first = bucket.sharing.rank * bucket.layout.shard_length
        return host[first + span.at : first + span.at + span.length].view(self._piece.weight.shape)


class Host:
    """The host's side of one rank, whose weights are on one device.

    All ranks of the world make theirs alike: the memory needed by the ranks of one machine is summed, and refused here
    if it is not available, before any of it is allocated.
    """

    def __init__(self, plan: Plan, device: torch.device, data: DataParallel, gather: Gather) -> None:
        share, self.copies = plan.offload, CopyStreams(device)
        # Separate streams: state waits for staging buffers, and must not delay weights for the next unit.
        self._state_copies = CopyStreams(device)
        #: What lives there with its gradients: buckets, and whole parameters that owners assemble from their pieces.
        self._buckets = [bucket for bucket in data.buckets if bucket.is_offloaded]
        self._owners = data.updates.offloaded
        self.states: HostStates | None = None
        if share.optimizer or share.parameters:
            check_on_host(data.updates.number_bytes)
            # Computed only here, as it takes a step of each optimizer on small weights.
            optimizers = {each: number_bytes() for each, number_bytes in data.updates.number_bytes.items()}
            self.states = HostStates(optimizers, share.optimizer, self._state_copies, self._weights())
            _check_room(plan, self.states.planned_bytes + self._offloaded_bytes, gather)
        self._leaving, self._num_steps = DeferredFree(DEFERRED_FREE_BYTES), 0
        for bucket in self._buckets:
            bucket.host_weights.move_in(self.copies, self._leaving, bucket.master)
            if isinstance(bucket.gradients, OffloadedGradients):
                bucket.gradients.move_in(self.copies, self._leaving)
        for owners in self._owners:
            owners.move_in(self.copies, self._leaving)
        self.activations = ActivationOffload(plan, self.copies) if share.activations else None

    def _weights(self) -> dict[nn.Parameter, OffloadedWeight]:
        """Return the optimizers' weights that live on the host: pieces, or whole parameters assembled from them."""
        found: dict[nn.Parameter, OffloadedWeight] = {
            piece.weight: OffloadedPiece(bucket, number)
            for bucket in self._buckets
            for number, piece in enumerate(bucket.pieces)
        }
        for owners in self._owners:
            found.update(owners.offloaded)
        return found

    @property
    def _offloaded_bytes(self) -> int:
        """Return the bytes of weights and gradients there, in their own precision, and of master weights."""
        masters = sum(bucket.master.nbytes for bucket in self._buckets if bucket.master is not None)
        wholes = sum(owners.num_bytes for owners in self._owners)
        return wholes + masters + sum(_num_numbers(each) * each.key.dtype.itemsize for each in self._buckets)

    def begin_step(self) -> None:
        """Begin a step. From the second one on, staging may use more memory: part of what the first step left
        unused."""
        self._num_steps += 1
        if self._num_steps == 2 and self._buckets:
            self._leaving.grow(spare_bytes(self.copies.device))
        if self.states is not None:
            self.states.begin()

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank has on the host now."""
        others = sum(each.num_bytes for each in (self.states, self.activations) if each is not None)
        return self._offloaded_bytes + others

    def wait(self) -> None:
        """Wait until everything that lives on the host is there. Later computation uses the new weights."""
        if self.states is not None:
            self.states.wait()
        for bucket in self._buckets:
            bucket.host_weights.settle()
        self._leaving.wait()

    def close(self) -> None:
        """Wait for transfers in progress, and end threads. State and weights stay where they are.

        The module's parameters are on the host from now on.
        """
        self.wait()
        if self.states is not None:
            self.states.close()
        for bucket in self._buckets:
            bucket.host_weights.stay_home()
        self._leaving.wait()
        for owners in self._owners:
            owners.close()
        if self.activations is not None:
            self.activations.close()
        self.copies.close()
        self._state_copies.close()


def _num_numbers(bucket: Bucket) -> int:
    """Return the number of elements of a bucket on the host, of weights and gradients."""
    weights = bucket.layout.shard_length if bucket.weights.is_sharded else bucket.layout.length
    return weights + (bucket.gradients.home_length if isinstance(bucket.gradients, OffloadedGradients) else 0)


def make_host(plan: Plan, device: torch.device, data: DataParallel, gather: Gather) -> Host | None:
    """Return the host's side, if the plan offloads anything."""
    return None if plan.offload == Offload() else Host(plan, device, data, gather)


def _check_room(plan: Plan, num_bytes: int, gather: Gather) -> None:
    """Refuse more than the host of this machine has, for all ranks on it. All ranks of the world call this."""
    here = socket.gethostname()
    told = [each for machine, each in gather((here, num_bytes)) if machine == here]
    check_host_memory(plan, sum(told), num_ranks=len(told), available=available_bytes())
