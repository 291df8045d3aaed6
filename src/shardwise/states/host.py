"""What a rank keeps on the host, by its plan: weights, the state of its optimizers, and what its forwards save."""

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.cluster.local import available_bytes
from shardwise.cost.memory import DEFERRED_FREE_BYTES
from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.planner.host_room import check_host_room
from shardwise.planner.plan import Offload, Plan
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.offloaded_gradients import OffloadedGradients
from shardwise.states.data_parallel import DataParallel
from shardwise.states.tiers.activation_offload import ActivationOffload
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.tiers.residency import OffloadedWeight

#: Gives what each rank of the world gives.
Gather = Callable[[Any], list[Any]]


class OffloadedPiece:
    """What a rank updates of a parameter that lives on the host. It is an `OffloadedWeight`."""

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

    def is_renewed(self, events: Sequence[Event]) -> None:
        self._bucket.host_weights.is_renewed(events)
        self._bucket.host_gradients.is_read(events)

    def _of(self, host: Tensor) -> Tensor:
        """Its numbers of what the bucket has on the host: of all of it, or of this rank's piece."""
        span, bucket = self._piece.span, self._bucket
        first = 0
        if len(host) == bucket.layout.length and not bucket.updates_whole:
            first = bucket.sharing.rank * bucket.layout.shard_length
        return host[first + span.at : first + span.at + span.length].view(self._piece.weight.shape)


class Host:
    """The host's side of one rank, whose weights are on one device.

    All ranks of the world make theirs alike: the room that those of one machine need is added up, and refused here if
    it is not there, before any of it is taken.
    """

    def __init__(self, plan: Plan, device: torch.device, data: DataParallel, gather: Gather) -> None:
        share, self.copies = plan.offload, CopyStreams(device)
        #: What lives there with its gradients: buckets, and wholes that owners make of their pieces.
        self._buckets = [bucket for bucket in data.buckets if bucket.is_offloaded]
        self._owners = data.updates.offloaded
        self.states: HostStates | None = None
        if share.optimizer or share.parameters:
            # Optimizers are asked for their bytes only here: that is a step of each on small weights.
            optimizers = {each: number_bytes() for each, number_bytes in data.updates.number_bytes.items()}
            self.states = HostStates(optimizers, share.optimizer, self.copies, self._weights())
            _check_room(plan, self.states.planned_bytes + self._offloaded_bytes, gather)
        self._leaving = DeferredFree(DEFERRED_FREE_BYTES)
        for bucket in self._buckets:
            bucket.host_weights.move_in(self.copies, bucket.master)
            if isinstance(bucket.gradients, OffloadedGradients):
                bucket.gradients.move_in(self.copies, self._leaving)
        for owners in self._owners:
            owners.move_in(self.copies, self._leaving)
        self.activations = ActivationOffload(plan, self.copies) if share.activations else None

    def _weights(self) -> dict[nn.Parameter, OffloadedWeight]:
        """What optimizers have of what lives on the host: pieces, or wholes that are made of these."""
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
        """What weights and gradients take there, in their own precision, and master weights."""
        masters = sum(bucket.master.nbytes for bucket in self._buckets if bucket.master is not None)
        wholes = sum(owners.num_bytes for owners in self._owners)
        return wholes + masters + sum(_num_numbers(each) * each.key.dtype.itemsize for each in self._buckets)

    def begin_step(self) -> None:
        """A step begins."""
        if self.states is not None:
            self.states.begin()

    @property
    def num_bytes(self) -> int:
        """What this rank has on the host now."""
        others = sum(each.num_bytes for each in (self.states, self.activations) if each is not None)
        return self._offloaded_bytes + others

    def wait(self) -> None:
        """Wait until all that lives on the host is there, and what is computed from now on uses the new weights."""
        if self.states is not None:
            self.states.wait()
        for bucket in self._buckets:
            bucket.host_weights.settle()
        self._leaving.wait()

    def close(self) -> None:
        """Wait for what is under way, and end threads. State stays where it is, weights come back."""
        self.wait()
        if self.states is not None:
            self.states.close()
        for bucket in self._buckets:
            bucket.host_weights.come_back()
        for owners in self._owners:
            owners.close()
        if self.activations is not None:
            self.activations.close()
        self.copies.close()


def _num_numbers(bucket: Bucket) -> int:
    """How many numbers of a bucket are on the host, of weights and gradients."""
    weights = bucket.layout.shard_length if bucket.weights.is_sharded else bucket.layout.length
    return weights + (bucket.gradients.home_length if isinstance(bucket.gradients, OffloadedGradients) else 0)


def make_host(plan: Plan, device: torch.device, data: DataParallel, gather: Gather) -> Host | None:
    """The host's side, if the plan has one."""
    return None if plan.offload == Offload() else Host(plan, device, data, gather)


def _check_room(plan: Plan, num_bytes: int, gather: Gather) -> None:
    """Refuse more than the host of this machine has, for all ranks on it. All ranks of the world call this."""
    here = socket.gethostname()
    told = [each for machine, each in gather((here, num_bytes)) if machine == here]
    check_host_room(plan, sum(told), num_ranks=len(told), available=available_bytes())
