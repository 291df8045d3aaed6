"""The weights of a bucket that lives on the host, and is copied to the device for each use.

              whole on every rank (zero 0 to 2)              in shards (zero 3)
    fetch     nothing                                        the shard comes
    start     all of it comes                                the shard is gathered, and goes
    release   the memory is given back                       the memory is given back
    step      a rank writes its piece on its host            a rank writes its shard on its host

Where the newest values are, of the piece that a rank updates and of the other ranks' pieces:

    own       others    since                                 the next `start`
    HOST      HOST      they were made, or all went home      all of it comes from the host
    HOST      PEERS     a step of zero 1 or 2                 the own piece comes, the others' are gathered and go home
    MASTER    HOST      a step of zero 0                      the master weight comes, is cast, and that goes home
    MASTER    PEERS     a step of zero 1 or 2                 both of the last two

16-bit weights may have master weights in full precision, for the piece that a rank updates: after a step these are
newer. In shards, the other ranks' pieces always come from peers.
"""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.ranks.exchange import Ticket
from shardwise.states.buckets.weights import Weights
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.swapped_storage import HostStorage, Presence


class Source(Enum):
    """The holder of the newest values of a piece."""

    HOST = "host"
    MASTER = "master"
    PEERS = "peers"


class OffloadedWeights(Weights):
    """Weights that live on the host from `move_in` on."""

    _storage: HostStorage | None = None
    #: Master weights of this rank's piece, if there are any.
    master: HostStorage | None = None
    own_source = Source.HOST
    leaves = True
    #: Whether they stay here until they are updated, even if all units have released them.
    is_held_for_update = False

    def move_in(self, copies: CopyStreams, leaving: DeferredFree, master: Tensor | None) -> None:
        """Allocate the host's memory, and free the device's; also for master weights."""
        self._storage = HostStorage(self.shard if self.is_sharded else self.whole, copies, leaving)
        self.master = None if master is None else HostStorage(master, copies, leaving)

    @property
    def storage(self) -> HostStorage:
        """The storage on the host."""
        assert self._storage is not None, "they have not moved in yet"
        return self._storage

    @property
    def kept(self) -> Tensor:
        return super().kept if self._storage is None else self._storage.host

    def settle(self) -> None:
        """Bring the newest values to the host."""
        for each in (self._storage, self.master):
            if each is not None:
                each.wait()

    def is_renewed(self, events: Sequence[Event]) -> None:
        """Record that this rank's piece is new on the host once these events are reached."""
        self.is_held_for_update = False
        self.leave()
        (self.master or self.storage).is_renewed(events)
        self.own_source = Source.HOST if self.master is None else Source.MASTER

    def hold_for_update(self) -> bool:
        """Keep them here until all of them are updated; return whether they were here."""
        was_here = self.presence is Presence.HERE
        self.wait()
        self.is_held_for_update = True
        return was_here

    def is_updated(self) -> None:
        """Record that all of them were updated here, and are in transit to the host."""
        self.is_held_for_update = False
        self.leave()

    def _bring_own(self, part: slice) -> None:
        """Bring this rank's piece to the device."""
        if self.own_source is Source.HOST or self.master is None:
            self.storage.start_part(part)
            self.storage.follow()
            return
        self.storage.reserve()
        self.master.follow()
        with torch.no_grad():
            self.storage.device[part].copy_(self.master.device)
        self.master.leave()
        self.storage.write_back([part])
        self.own_source = Source.HOST

    def leave(self) -> None:
        """Free the memory on the device."""
        self._holders.clear()
        self.release()

    def stay_home(self) -> None:
        """Bring the newest values to the host for good, and free the device: the engine is not run again."""
        self.settle()


class OffloadedWhole(OffloadedWeights):
    """Weights that every rank has whole (zero 0 to 2)."""

    others_source = Source.HOST

    def move_in(self, copies: CopyStreams, leaving: DeferredFree, master: Tensor | None) -> None:
        self.wait()
        super().move_in(copies, leaving, master)
        self.presence = Presence.AWAY

    def expire(self) -> None:
        self.leave()
        self.others_source = Source.PEERS if self._group.size > 1 else Source.HOST

    def _bring(self) -> Ticket:
        if self.others_source is Source.PEERS:
            self._bring_own(self._own)
            return self._exchange.gather(self.whole, self.shard, self._group, self._channel, lends=True)
        if self.own_source is Source.MASTER:
            self._bring_own(slice(0, self.layout.length))
        self.storage.start()
        return _Arrival(self.storage)

    def _has_come(self) -> None:
        if self.others_source is Source.PEERS:
            own = self._own
            self.storage.write_back([slice(0, own.start), slice(own.stop, self.layout.length)])
            self.others_source = Source.HOST

    def release(self) -> None:
        if self._storage is None or self.is_held_for_update:
            return
        if self.presence is Presence.COMING:
            self.wait()
        self._storage.leave()
        self.presence = Presence.AWAY

    def stay_home(self) -> None:
        if self.own_source is Source.MASTER or self.others_source is Source.PEERS:
            self.wait()  # Newer values of other holders go through the device to the host.
        self.leave()
        super().stay_home()
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.data = self.storage.host[slot.start : slot.stop].view(slot.shape)

    @property
    def _own(self) -> slice:
        length = self.layout.shard_length
        return slice(self._group.rank * length, (self._group.rank + 1) * length)


class OffloadedShards(OffloadedWeights):
    """Weights of which every rank has a shard (zero 3)."""

    def fetch(self) -> None:
        if self.presence is Presence.AWAY:
            (self.master if self.own_source is Source.MASTER and self.master else self.storage).start()

    def _bring(self) -> Ticket:
        self._bring_own(slice(0, self.layout.shard_length))
        self.whole.untyped_storage().resize_(self.whole_bytes)
        return self._exchange.gather(self.whole, self.shard, self._group, self._channel, lends=True)

    def _has_come(self) -> None:
        self.storage.leave()

    def release(self) -> None:
        super().release()
        for each in (self._storage, self.master):
            if each is not None:
                each.leave()


class _Arrival:
    """A storage in transit."""

    def __init__(self, storage: HostStorage) -> None:
        self._storage = storage

    def wait(self) -> None:
        self._storage.follow()
