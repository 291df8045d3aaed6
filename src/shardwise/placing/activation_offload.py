"""Activation offload to the host, one for each place that computes.

Layer by layer, a forward runs on several devices, and each device has its own offload. In a pipeline, every place has
its own thread, and saves in that thread. All of them share the host's memory.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.cluster.local import available_bytes
from shardwise.errors import ShardwiseError
from shardwise.placing.layout import NoRoomError, window_bytes
from shardwise.placing.places import Place
from shardwise.planner.plan import Offload, Plan
from shardwise.states.tiers.activation_offload import ActivationOffload
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.torch_private import version_of, without_torch_function
from shardwise.units import counted, format_bytes


class _Saved(NamedTuple):
    """A saved tensor, or its stand-in; and a witness whose version shows whether it was changed since."""

    packed: Any
    unpack: Callable[[Any], Tensor] | None
    witness: Tensor
    version: int


class _Room:
    """The host memory for the activations of all places. Without a limit it is the available memory."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self.by_place: dict[str, ActivationOffload] = {}

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.by_place.values())

    def check(self, num_bytes: int) -> None:
        """Refuse more of the host's memory than there is."""
        free = available_bytes()
        if self._limit_bytes is not None:
            free = min(free, self._limit_bytes - self.num_bytes)
        if num_bytes <= free:
            return
        held = ", ".join(f"{format_bytes(each.num_bytes)} of {name}" for name, each in self.by_place.items())
        raise NoRoomError(
            f"no room on the host for activations: it holds {held}, {format_bytes(num_bytes)} more are to go there, and"
            f" there is room for {format_bytes(max(free, 0))}",
            remedy="a smaller activations_on_host=, a smaller batch, a larger budget for the cpu, or gradient"
            " checkpointing, which keeps fewer activations",
        )


class _Site:
    """The activation offload of one place, used by one thread at a time. It lives as long as any graph that uses it."""

    def __init__(self, place: Place, part: float, room: _Room) -> None:
        self.device = place.device
        self.copies = CopyStreams(place.device)
        plan = Plan(offload=Offload(activations=part))
        self.offload = ActivationOffload(plan, self.copies, window_bytes=window_bytes(place), check=room.check)
        room.by_place[place.name] = self.offload
        self._nothing = torch.empty(0, device=place.device)
        # In a backward every GPU has its own thread, which may reach tensors that were saved on another GPU.
        self._one_at_a_time = threading.Lock()
        weakref.finalize(self, _close, self.offload, self.copies)

    def pack(self, hooks: Any, tensor: Tensor) -> _Saved:
        # Not as torch functions: under `CrossDeviceMode`, a copy between devices would become one on a single device.
        with self._one_at_a_time, without_torch_function():
            packed = hooks.pack_hook(tensor)
            if isinstance(packed, Tensor):
                return _as_it_is(packed)
            # Only the version of the tensor is kept, which all views of one storage share.
            witness = tensor.detach()
            witness.data = self._nothing
            return _Saved(packed, partial(self._unpack, hooks), witness, version_of(tensor))

    def _unpack(self, hooks: Any, packed: Any) -> Tensor:
        with self._one_at_a_time, without_torch_function():
            found: Tensor = hooks.unpack_hook(packed)
            return found


class PlacedActivationOffload:
    """The offloaded activations of all places. `limit_bytes` is the host memory for all of them together."""

    def __init__(self, parts: Mapping[Place, float], limit_bytes: int | None) -> None:
        #: The fraction of its activations that each place offloads, by its name.
        self.parts = {place.name: part for place, part in parts.items() if part}
        self._room = _Room(limit_bytes)
        self._sites = {place.name: _Site(place, part, self._room) for place, part in parts.items() if part}
        # Places on the CPU are one device: layer by layer they share one offload, that of the place that sends most.
        most = sorted(self._sites, key=self.parts.__getitem__)
        self._by_device = {self._sites[name].device: self._sites[name] for name in most}

    @property
    def host_bytes(self) -> int:
        """The allocated host memory in bytes. It is reused in every step."""
        return self._room.num_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes copied to the host since the beginning."""
        return sum(each.sent_bytes for each in self._room.by_place.values())

    @property
    def returned_bytes(self) -> int:
        """Bytes copied back from the host since the beginning."""
        return sum(each.returned_bytes for each in self._room.by_place.values())

    def saving(self, stays: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """Return a context for a forward that goes from device to device. `stays` is there anyway."""
        return _saving(self._by_device.values(), list(stays))

    def saving_at(self, place: Place, stays: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """Return a context for the forward of a stage, in the thread of its place."""
        return _saving([self._sites[place.name]] if place.name in self._sites else [], list(stays))

    def put_away(self, place: Place) -> None:
        """Free what one half of a backward has brought back at a place, until the other half needs it."""
        if place.name in self._sites:
            self._sites[place.name].offload.put_away()


def _saving(sites: Iterable[_Site], stays: list[Tensor]) -> AbstractContextManager[Any]:
    # The hooks of each place's offload in one forward.
    pairs = {site.device: (site, site.offload.saving(stays, None)) for site in sites}

    def pack(tensor: Tensor) -> _Saved:
        if tensor.device not in pairs:
            return _as_it_is(tensor.detach())
        site, hooks = pairs[tensor.device]
        return site.pack(hooks, tensor)

    return saved_tensors_hooks(pack, _unpack)


def _as_it_is(tensor: Tensor) -> _Saved:
    return _Saved(tensor, None, tensor, version_of(tensor))


def _unpack(saved: _Saved) -> Tensor:
    packed, unpack, witness, version = saved
    if version_of(witness) != version:
        raise ShardwiseError(
            "a tensor that a backward needs was changed in place after it was saved, by"
            f" {counted(version_of(witness) - version, 'operation')}",
            remedy="x = x + y instead of x += y where operations before have kept x",
        )
    if unpack is not None:
        return unpack(packed)
    assert isinstance(packed, Tensor), "what stays is kept as it is"
    return packed


def _close(offload: ActivationOffload, copies: CopyStreams) -> None:
    offload.close()
    copies.close()
