"""Offload part of the activations that forwards save for their backwards to the host until they are needed.

    compute   forward of 0, 1, 2, 3 | ...... | backward of 3, 2, 1, 0
    out         a0  a1  a2  a3
    in                                 a3  a2  a1  a0        ahead of their use, in the order that is expected

The schedule says when. Activations are copied out while the forward computes; OFFLOAD frees their memory on the device.
RELOAD, some computations before the backward, starts to copy the first of them back. Each access by the backward
prefetches the next ones.

Saved-tensor hooks of autograd intercept what it saves. A storage is moved as a whole, once, however many views of it
are saved, and comes back with the same views: the backward sees the same values at the same strides. Tensors that are
on the device anyway (weights, the batch, a stage's inputs) stay. A forward that is ahead of its copies waits for them;
otherwise no memory would be saved.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.cluster.local import available_bytes
from shardwise.cost.memory import DEFERRED_FREE_BYTES
from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.planner.host_memory import check_host_memory
from shardwise.planner.plan import Plan
from shardwise.stages.activation_bytes import Kept
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.packing import storage_of
from shardwise.torch_private import is_view, version_of

#: Tensors smaller than this are not worth a copy.
LEAST_BYTES = 1024

#: Memory, by what tells its storage from others also where it comes and goes (ZeRO 3), and how often it was written to
#: when it was saved. Parts of it that are no views of anything (`unsafe_chunk`, as in LSTMs) count writes for
#: themselves, and are told apart by where they lie.
_Key = tuple[int, int, Hashable]


class _Offloaded:
    """Memory that went to the host: `host` is its part of a pinned buffer.

    device           `here`    `is_followed`    left by
    on the host      None      no               bring: on its way
    on its way       set       no               unpack: here;  drop: on the host, once the copy is over
    here             set       yes              drop: on the host
    """

    def __init__(self, owner: "ActivationOffload", pinned: Tensor, host: Tensor, gone: Event, frame: "_Frame") -> None:
        self.pinned, self.host, self.gone, self.frame = pinned, host, gone, frame
        self.number = len(frame.saved)
        self.here: Tensor | None = None
        self.arrives: Event | None = None
        #: Whether computation is ordered after its arrival.
        self.is_followed = False
        self._owner = owner

    def __del__(self) -> None:
        self._owner.forget(self)


class _View(NamedTuple):
    """A saved tensor: the memory that it is a view of, and the view's geometry."""

    away: _Offloaded
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Frame:
    """One forward. A half on the host is every other byte, not the first half: copies are spread over the forward."""

    def __init__(self, stays: Iterable[Tensor], kept: Kept | None) -> None:
        self.stays = {storage_of(each) for each in stays}
        self.kept = kept
        self.saved: list[weakref.ref[_Offloaded]] = []
        #: Storages seen. While there is a weak reference to one, no other storage can have its address.
        self.known: dict[_Key, tuple[StorageWeakRef, weakref.ref[_Offloaded] | None]] = {}
        self.seen_bytes = self.offloaded_bytes = 0


class ActivationOffload:
    """The part of a rank's saved tensors that is on the host.

    At most `window_bytes` are on their way out or ahead of their use. `check` is asked before more of the host's memory
    is taken, and refuses; without one that is what the plan's sentence says.
    """

    def __init__(
        self,
        plan: Plan,
        copies: CopyStreams,
        *,
        window_bytes: int | None = None,
        check: Callable[[int], None] | None = None,
    ) -> None:
        self._plan, self._copies = plan, copies
        self._window_bytes = DEFERRED_FREE_BYTES if window_bytes is None else window_bytes
        self._leaving = DeferredFree(self._window_bytes)
        self._check = check or self._check_host
        #: Unused host memory, by size, with the events after which it is free.
        self._spare: dict[int, list[tuple[Tensor, list[Event]]]] = {}
        #: Named forwards, as long as a tensor saved by them is needed.
        self._frames: weakref.WeakValueDictionary[Hashable, _Frame] = weakref.WeakValueDictionary()
        #: Memory that was copied back and may be used again.
        self._brought: weakref.WeakSet[_Offloaded] = weakref.WeakSet()
        #: The bytes allocated on the host; and the bytes sent there, and copied back, since the start.
        self.num_bytes = self.sent_bytes = self.returned_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The bytes that were copied back, or are in transit, and were not put away."""
        return sum(each.here.numel() for each in self._brought if each.here is not None)

    def saving(
        self, stays: Iterable[Tensor], kept: Kept | None, name: Hashable | None = None
    ) -> AbstractContextManager[Any]:
        """Wrap a forward. `stays` is on the device anyway; what is kept on the device is counted by `kept`."""
        frame = _Frame(stays, kept)
        if name is not None:
            self._frames[name] = frame
        return torch.autograd.graph.saved_tensors_hooks(lambda each: self._pack(frame, each), self._unpack)

    def offload(self, name: Hashable) -> None:  # noqa: ARG002 - what was saved is on its way since it was
        """OFFLOAD: free the memory of what has left."""
        self._leaving.sweep()

    def reload(self, name: Hashable) -> None:
        """RELOAD: start to copy back what the backward of a forward needs first."""
        frame = self._frames.get(name)
        if frame is not None:
            self._leaving.sweep()
            self._bring_before(frame, len(frame.saved))

    def put_away(self, name: Hashable | None = None) -> None:
        """Free what one half of a backward has copied back, until the other half needs it.

        With a name, only that of one forward; memory copied back for another's backward stays.
        """
        frame = None if name is None else self._frames.get(name)
        for away in [each for each in self._brought if name is None or each.frame is frame]:
            self._drop(away)
            self._brought.discard(away)
        self._leaving.sweep()

    def forget(self, away: _Offloaded) -> None:
        """Make host memory reusable: nothing can access this any more."""
        events = [away.gone] if away.arrives is None else [away.gone, away.arrives]
        self._drop(away)
        self._spare.setdefault(away.pinned.numel(), []).append((away.pinned, events))

    def close(self) -> None:
        """Wait for copies in progress, and release everything."""
        self._leaving.wait()
        self._spare.clear()

    # ---------------------------------------------------------------------------------------------------------------

    def _pack(self, frame: _Frame, tensor: Tensor) -> "Tensor | _View":
        away = self._find_away(frame, tensor)
        if away is None:
            if frame.kept is not None:
                frame.kept.count(tensor)
            # Detached: the tensor may refer to the node that saves it, and neither would ever be freed.
            return tensor.detach()
        return _View(away, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _find_away(self, frame: _Frame, tensor: Tensor) -> _Offloaded | None:
        """Return the memory of a tensor on the host, which may be sent only now; None if it stays."""
        key = (storage_of(tensor), version_of(tensor), _part_of(tensor))
        if key[0] in frame.stays or not self._may_go(tensor):
            return None
        if key in frame.known:
            _, known = frame.known[key]
            away = None if known is None else known()
            if known is None or away is not None:
                return away
        memory = tensor.untyped_storage()
        frame.seen_bytes += memory.nbytes()
        if frame.offloaded_bytes + memory.nbytes() > self._plan.offload.activations * frame.seen_bytes:
            frame.known[key] = StorageWeakRef(memory), None  # type: ignore[no-untyped-call]
            return None
        frame.offloaded_bytes += memory.nbytes()
        away = self._send(frame, tensor)
        frame.known[key] = StorageWeakRef(memory), weakref.ref(away)  # type: ignore[no-untyped-call]
        return away

    def _may_go(self, tensor: Tensor) -> bool:
        num_bytes = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
        is_plain = not (tensor.is_conj() or tensor.is_neg() or num_bytes % tensor.element_size())
        return is_plain and num_bytes >= LEAST_BYTES and tensor.device == self._copies.device

    def _send(self, frame: _Frame, tensor: Tensor) -> _Offloaded:
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        pinned, events = self._take_pinned(memory.numel())
        host = pinned[: memory.numel()]
        gone = self._copies.to_host(host, memory, events)
        away = _Offloaded(self, pinned, host, gone, frame)
        frame.saved.append(weakref.ref(away))
        self.sent_bytes += memory.numel()
        self._leaving.hold(gone, memory)
        self._leaving.sweep()
        return away

    def _drop(self, away: _Offloaded) -> None:
        """Free the memory on the device, after the copy into it.

        If it was used, computation is ordered after the copy, and memory is reused in that order.
        """
        if away.here is not None and away.arrives is not None and not away.is_followed:
            self._leaving.hold(away.arrives, away.here)
        away.here, away.is_followed = None, False

    def _take_pinned(self, num_bytes: int) -> tuple[Tensor, list[Event]]:
        """Return host memory: spare memory of up to twice the size, as lengths may change in every step."""
        # A list, because other threads may return memory at any moment.
        fitting = [size for size in list(self._spare) if num_bytes <= size <= 2 * num_bytes and self._spare[size]]
        if fitting:
            return self._spare[min(fitting)].pop()
        self._check(num_bytes)
        self.num_bytes += num_bytes
        return self._copies.pinned((num_bytes,), torch.uint8), []

    def _check_host(self, num_bytes: int) -> None:
        free = available_bytes()
        check_host_memory(self._plan, self.num_bytes + num_bytes, num_ranks=1, available=self.num_bytes + free)

    def _unpack(self, saved: "Tensor | _View") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        away, frame = saved.away, saved.away.frame
        self._leaving.sweep()
        self._bring(away)
        self._bring_before(frame, away.number)
        assert away.here is not None, "it was brought"
        assert away.arrives is not None, "it was brought"
        self._copies.follow(away.arrives)
        away.is_followed = True
        typed = away.here.view(saved.dtype)
        return typed.as_strided(saved.size, saved.stride, saved.offset)

    def _bring_before(self, frame: _Frame, number: int) -> None:
        """Prefetch what a forward saved before the memory of this number, as far as the window allows.

        The backward needs it afterwards. If copies to the host are late at the end of a forward, memory that has not
        left yet counts as part of the window. Even then one is prefetched; otherwise each would be waited for.
        """
        ahead_bytes, num_ahead = self._leaving.num_bytes, 0
        for each in reversed(frame.saved[:number]):
            other = each()
            if num_ahead and ahead_bytes >= self._window_bytes:
                break
            if other is not None:
                ahead_bytes, num_ahead = ahead_bytes + other.host.numel(), num_ahead + 1
                self._bring(other)

    def _bring(self, away: _Offloaded) -> None:
        """Copy it back, if it is not here or in transit."""
        if away.here is None:
            away.here = torch.empty_like(away.host, device=self._copies.device)
            # Newly allocated memory may be in use until all computation launched so far is done.
            away.arrives = self._copies.to_device(away.here, away.host, [away.gone, *self._copies.computed()])
            self._brought.add(away)
            self.returned_bytes += away.host.numel()


def _part_of(tensor: Tensor) -> Hashable:
    """Return the offset of a tensor in its memory, if writes to it do not show in other parts."""
    if is_view(tensor) or tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
        return None
    return tensor.storage_offset(), tensor.size(), tensor.stride()
