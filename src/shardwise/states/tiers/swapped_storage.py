"""A run of bytes on the device that comes from a source, and whose storage is empty while it is away.

Whatever looks into that storage, such as a parameter, or what autograd has saved of one in a forward, has its numbers
again when they have come again for the backward.

    state      the storage     the numbers                        left by
    AWAY       is empty        at their source                    start: COMING;  reserve: HERE
    COMING     has memory      on their way                       follow: HERE;   leave: AWAY
    HERE       has memory      there for what is computed next    leave: AWAY, or LEAVING if some are on their way home
    LEAVING    has memory      here, and on their way home        they are there: AWAY;  start: HERE

A `HostStorage` has pinned memory of its own; a `SourcedStorage` is copied from wherever it lives: pinned memory that is
somebody else's, or a file by way of a pinned buffer. `reserve` is for numbers that come from elsewhere, a peer or a
master weight: the caller writes them. What is written on the device goes home by `write_back`, and the host is behind
until that copy is over. Nothing that is computed waits for it: the memory is let go when somebody looks afterwards.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from torch import Tensor

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import CopyStreams

#: Has the numbers copied to the device, after some events; reached when they are there.
Fetch = Callable[[Sequence[Event]], Event]


class Presence(Enum):
    """Where numbers are: the table above. Of the weights of a bucket, which never leave by themselves, that of
    `buckets/weights.py`."""

    AWAY = "away"
    COMING = "coming"
    HERE = "here"
    LEAVING = "leaving"


class SwappedStorage:
    """A tensor of the device, its storage being its own, that comes when it is told to."""

    def __init__(self, device: Tensor, copies: CopyStreams) -> None:
        self.device, self._copies = device, copies
        self._num_bytes = device.nbytes
        self.state = Presence.AWAY
        self._arrives: Event | None = None
        self._give_memory()

    def reserve(self) -> None:
        """Have memory on the device, for numbers that come from elsewhere."""
        if self.state is Presence.AWAY:
            self._take_memory()
            self.state = Presence.HERE
        elif self.state is Presence.LEAVING:
            self._take_back()

    def start(self) -> None:
        """Have it come, if it is not here or on its way."""
        self._start(self._fetch)

    def _fetch(self, after: Sequence[Event]) -> Event:
        """Have it copied from its source, after some events."""
        raise NotImplementedError

    def _start(self, fetch: Fetch) -> None:
        if self.state is Presence.LEAVING:
            self._take_back()
        elif self.state is Presence.AWAY:
            self._take_memory()
            # The memory was somebody else's until all that is computed by now is.
            self._arrives = fetch(self._copies.computed())
            self.state = Presence.COMING

    def _take_back(self) -> None:
        """LEAVING to HERE."""
        self.state = Presence.HERE

    def _take_memory(self) -> None:
        self.device.untyped_storage().resize_(self._num_bytes)

    def _give_memory(self) -> None:
        self.device.untyped_storage().resize_(0)

    def follow(self) -> None:
        """Have it here, for what is computed next."""
        self.start()
        if self._arrives is not None:
            self._copies.follow(self._arrives)
        self._arrives, self.state = None, Presence.HERE

    def leave(self) -> None:
        """Nobody needs it."""
        if self.state in (Presence.AWAY, Presence.LEAVING):
            return
        # Memory is used again in the order of what is computed: that has to come after the copy into it.
        self.follow()
        self._give_memory()
        self.state = Presence.AWAY


class SourcedStorage(SwappedStorage):
    """A tensor of the device whose numbers somebody else has copied."""

    def __init__(self, device: Tensor, copies: CopyStreams, source: Fetch) -> None:
        super().__init__(device, copies)
        self._source = source

    def _fetch(self, after: Sequence[Event]) -> Event:
        return self._source(after)


class HostStorage(SwappedStorage):
    """A tensor of the device that moves to pinned memory of the host, and lives there."""

    def __init__(self, device: Tensor, copies: CopyStreams, leaving: DeferredFree) -> None:
        #: How often it has left while it was on its way home, and when what went with the last is there.
        self._leaving, self._num_left = leaving, 0
        self._going: list[Event] = []
        self.host = copies.pinned(device.shape, device.dtype)
        self.host.copy_(device)
        #: When the host has the newest numbers; and when it will have those that were written on the device.
        self._renewed: list[Event] = []
        self._written: list[Event] = []
        super().__init__(device, copies)

    def start_part(self, part: slice) -> None:
        """Have memory for all of it, and a part of it come."""
        self._start(lambda after: self._copy(self.device[part], self.host[part], after))

    def write_back(self, parts: Sequence[slice]) -> None:
        """What was computed here of some parts is what they are from now on."""
        some = [part for part in parts if part.start < part.stop]
        self.is_written([self._copies.to_host(self.host[part], self.device[part], self._renewed) for part in some])

    def is_written(self, events: Sequence[Event]) -> None:
        """What was computed here is on its way home, and there once these events are reached."""
        self._written += events

    def leave(self) -> None:
        if not self._written or self.state is not Presence.HERE:
            super().leave()
            return
        self.state = Presence.LEAVING
        self._num_left += 1
        self._going, self._written = self._written, []
        self._renewed += self._going
        *others, last = self._going
        for event in others:
            self._leaving.hold(event)
        self._leaving.hold(last, self.device, then=partial(self._has_left, self._num_left))
        self._leaving.sweep()

    def _take_back(self) -> None:
        # What is still read on its way home must not be given back by the next leaving either.
        self._written += self._going
        super()._take_back()

    def _has_left(self, number: int) -> None:
        """All that was written is at home, of the leaving of this number: it may have been taken back since."""
        if self.state is Presence.LEAVING and number == self._num_left:
            self._give_memory()
            self.state = Presence.AWAY

    def is_renewed(self, events: Sequence[Event]) -> None:
        """The numbers on the host are new once these events are reached; what is here is old."""
        self.leave()
        self._renewed += events

    def wait(self) -> None:
        """Have what is on the host be the newest."""
        for event in [*self._renewed, *self._written]:
            event.wait()
        self._renewed.clear()

    def _fetch(self, after: Sequence[Event]) -> Event:
        return self._copy(self.device, self.host, after)

    def _copy(self, device: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        renewed, self._renewed = self._renewed, []
        return self._copies.to_device(device, host, [*renewed, *after])
