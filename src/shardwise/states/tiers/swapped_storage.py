"""A buffer on the device that is copied from a source, and whose storage is empty while it is away.

Every view of that storage, such as a parameter, or what autograd saved of one in a forward, has its values again when
they have been copied again for the backward.

    state      the storage     the values                         left by
    AWAY       is empty        at their source                    start: COMING;  reserve: HERE
    COMING     has memory      in transit                         follow: HERE;   leave: AWAY
    HERE       has memory      there for later computation        leave: AWAY, or LEAVING if some are in transit back
    LEAVING    has memory      here, and in transit back          they have arrived: AWAY;  start: HERE

A `HostStorage` has its own pinned memory; a `SourcedStorage` is copied from elsewhere: pinned memory of another owner,
or a file through a pinned buffer. `reserve` is for values of other origin, such as a peer or a master weight: the
caller writes them. Values written on the device are copied back by `write_back`, and the host is outdated until that
copy is over. Computation does not wait for it: the memory is freed at the next call after the copy.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from torch import Tensor

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import CopyStreams

#: Copies the values to the device, after some events; the result is reached when they are there.
Fetch = Callable[[Sequence[Event]], Event]


class Presence(Enum):
    """Where the values are: see the table above. For a bucket's weights, which never leave by themselves, see
    `buckets/weights.py`."""

    AWAY = "away"
    COMING = "coming"
    HERE = "here"
    LEAVING = "leaving"


class SwappedStorage:
    """A device tensor with its own storage, which is copied on request."""

    def __init__(self, device: Tensor, copies: CopyStreams) -> None:
        self.device, self._copies = device, copies
        self._num_bytes = device.nbytes
        self.state = Presence.AWAY
        self._arrives: Event | None = None
        self._give_memory()

    def reserve(self) -> None:
        """Allocate memory on the device, for values of other origin."""
        if self.state is Presence.AWAY:
            self._take_memory()
            self.state = Presence.HERE
        elif self.state is Presence.LEAVING:
            self._take_back()

    def start(self) -> None:
        """Start to copy it, if it is not here or in transit."""
        self._start(self._fetch)

    def _fetch(self, after: Sequence[Event]) -> Event:
        """Copy it from its source, after some events."""
        raise NotImplementedError

    def _start(self, fetch: Fetch) -> None:
        if self.state is Presence.LEAVING:
            self._take_back()
        elif self.state is Presence.AWAY:
            self._take_memory()
            # Newly allocated memory may be in use until all computation launched so far is done.
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
        """Make it available to later computation."""
        self.start()
        if self._arrives is not None:
            self._copies.follow(self._arrives)
        self._arrives, self.state = None, Presence.HERE

    def leave(self) -> None:
        """Free its memory."""
        if self.state in (Presence.AWAY, Presence.LEAVING):
            return
        # Memory is reused in the order of computation, which has to be after the copy into it.
        self.follow()
        self._give_memory()
        self.state = Presence.AWAY


class SourcedStorage(SwappedStorage):
    """A device tensor whose values are copied from another owner's memory."""

    def __init__(self, device: Tensor, copies: CopyStreams, source: Fetch) -> None:
        super().__init__(device, copies)
        self._source = source

    def _fetch(self, after: Sequence[Event]) -> Event:
        return self._source(after)


class HostStorage(SwappedStorage):
    """A device tensor that moves to pinned memory of the host, and lives there."""

    def __init__(self, device: Tensor, copies: CopyStreams, leaving: DeferredFree) -> None:
        #: How often it has left while in transit back, and the events of the last time.
        self._leaving, self._num_left = leaving, 0
        self._going: list[Event] = []
        self.host = copies.pinned(device.shape, device.dtype)
        self.host.copy_(device)
        #: Events after which the host has the newest values; and those of values written on the device.
        self._renewed: list[Event] = []
        self._written: list[Event] = []
        super().__init__(device, copies)

    def start_part(self, part: slice) -> None:
        """Allocate memory for all of it, and copy a part."""
        self._start(lambda after: self._copy(self.device[part], self.host[part], after))

    def write_back(self, parts: Sequence[slice]) -> None:
        """Copy some parts that were computed here back: they are the values from now on."""
        some = [part for part in parts if part.start < part.stop]
        self.is_written([self._copies.to_host(self.host[part], self.device[part], self._renewed) for part in some])

    def is_written(self, events: Sequence[Event]) -> None:
        """Record that what was computed here is in transit back, and arrives with these events."""
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
        # Memory that is still read by a copy must not be freed by the next leave either.
        self._written += self._going
        super()._take_back()

    def _has_left(self, number: int) -> None:
        """Handle the arrival of everything written before the leave of this number; it may have been taken back
        since."""
        if self.state is Presence.LEAVING and number == self._num_left:
            self._give_memory()
            self.state = Presence.AWAY

    def is_renewed(self, events: Sequence[Event]) -> None:
        """Record that the values on the host are new once these events are reached; those here are outdated."""
        self.leave()
        self._renewed += events

    def wait(self) -> None:
        """Wait until the host has the newest values."""
        for event in [*self._renewed, *self._written]:
            event.wait()
        self._renewed.clear()

    def _fetch(self, after: Sequence[Event]) -> Event:
        return self._copy(self.device, self.host, after)

    def _copy(self, device: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        renewed, self._renewed = self._renewed, []
        return self._copies.to_device(device, host, [*renewed, *after])
