"""The weights of a bucket, where they live on the host and come to the device for their use.

              whole on every rank (zero 0 to 2)              in shards (zero 3)
    fetch     nothing                                        the shard comes
    start     all of it comes                                the shard is gathered, and goes
    release   the memory is given back                       the memory is given back
    step      a rank writes its piece at home                a rank writes its shard at home

Where each rank has written a piece of its own (zero 1 and 2), the others' pieces at home are old. So the next time a
rank's own piece comes alone, the others' come from the other ranks, and go home too.

Weights of 16 bits may have copies in full precision of what a rank updates, the master. After a step that comes once,
is cast, and what this gives goes home.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.dataflow.streams import Event
from shardwise.states.buckets.weights import Weights
from shardwise.states.tiers.copy_streams import Crossing
from shardwise.states.tiers.swapped_storage import Guest


class LodgedWeights(Weights):
    """Weights that live on the host from `move_in` on."""

    _guest: Guest | None = None
    #: Copies in full precision of what this rank updates, if there are any, and whether they are newer.
    master: Guest | None = None
    _is_behind = False

    def move_in(self, crossing: Crossing, master: Tensor | None) -> None:
        """Take the host's memory, and give back the device's; so of copies in full precision."""
        self._guest = Guest(self.shard if self.is_sharded else self._flat, crossing)
        self.master = None if master is None else Guest(master, crossing)

    @property
    def guest(self) -> Guest:
        """What lives on the host."""
        assert self._guest is not None, "they have not moved in yet"
        return self._guest

    @property
    def home(self) -> Tensor:
        return super().home if self._guest is None else self._guest.home

    def settle(self) -> None:
        """Have what is at home be the newest."""
        for each in (self._guest, self.master):
            if each is not None:
                each.wait()

    def is_renewed(self, marks: Sequence[Event]) -> None:
        """The numbers that this rank updates are new at home once these marks are reached."""
        self.leave()
        (self.master or self.guest).is_renewed(marks)
        self._is_behind = self.master is not None

    def _bring(self, part: slice) -> None:
        """Have come what this rank updates of them, from its copy in full precision if that is newer."""
        if not self._is_behind or self.master is None:
            self.guest.start(part)
            self.guest.follow()
            return
        self.guest.take_room()
        self.master.follow()
        with torch.no_grad():
            self.guest.here[part].copy_(self.master.here)
        self.master.leave()
        self.guest.write_home([part])
        self._is_behind = False

    def leave(self) -> None:
        """Nobody needs them."""
        self._holders.clear()
        self.release()

    def come_back(self) -> None:
        """Be on the device for good."""
        if self.master is not None:
            self.master.follow()


class LodgedWhole(LodgedWeights):
    """Weights that every rank has all of (zero 0 to 2)."""

    #: Whether other ranks have newer numbers of their pieces.
    _is_old = False

    def move_in(self, crossing: Crossing, master: Tensor | None) -> None:
        self.wait()
        super().move_in(crossing, master)
        self._is_here = False

    def expire(self) -> None:
        self.leave()
        self._is_old = self._group.size > 1

    def start(self) -> None:
        if self._is_here or self._coming is not None:
            return
        if self._is_old:
            self._bring(self._own)
            self._coming = self._exchange.gather(self._flat, self.shard, self._group, self._channel, lends=True)
            return
        if self._is_behind:
            self._bring(slice(0, self.layout.length))
        self.guest.start()
        self._coming = _Arrival(self.guest)

    def wait(self) -> None:
        super().wait()
        if self._is_old:
            own = self._own
            self.guest.write_home([slice(0, own.start), slice(own.stop, self.layout.length)])
            self._is_old = False

    def release(self) -> None:
        if self._guest is None:
            return
        if self._coming is not None:
            self.wait()
        self._guest.leave()
        self._is_here = False

    def come_back(self) -> None:
        self.hold(self)
        super().come_back()

    @property
    def _own(self) -> slice:
        length = self.layout.shard_length
        return slice(self._group.rank * length, (self._group.rank + 1) * length)


class LodgedShards(LodgedWeights):
    """Weights of which every rank has a shard (zero 3)."""

    def fetch(self) -> None:
        if not self._is_here and self._coming is None:
            (self.master if self._is_behind and self.master else self.guest).start()

    def start(self) -> None:
        if self._is_here or self._coming is not None:
            return
        self._bring(slice(0, self.layout.shard_length))
        self._flat.untyped_storage().resize_(self.whole_bytes)
        self._coming = self._exchange.gather(self._flat, self.shard, self._group, self._channel, lends=True)

    def wait(self) -> None:
        super().wait()
        self.guest.leave()

    def release(self) -> None:
        super().release()
        for each in (self._guest, self.master):
            if each is not None:
                each.leave()

    def come_back(self) -> None:
        self._bring(slice(0, self.layout.shard_length))
        super().come_back()


class _Arrival:
    """A guest that is on its way."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def wait(self) -> None:
        self._guest.follow()
