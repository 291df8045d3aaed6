"""Optimizer-state prefetch: chunks of host state are copied to the device, updated there, and copied back.

    compute   forward | backward, gradients of 3, 2, 1, 0 | forward of 0, 1, 2, 3
    in        s3 s2        s1  s0                              ahead of its turn, as far as there are staging buffers
    update                 3   2   1   0                       when somebody asks for it and it is here
    out                        s3  s2  s1  s0                  while others come

A chunk is the content of one staging buffer: it is updated together and copied back. Its states:

    state      its numbers are                            left by
    HOST       on the host, once `newest` is reached      bring: STAGED
    STAGED     in a staging buffer, once `arrives` is     update: LEAVING, or HOST if nothing was written; drop: HOST
    LEAVING    written, and still to be told to go home   send: HOST

In addition a chunk may be expected (it was requested in the last step), and requested (its gradients are final, or will
be once `gradients` is reached). Expected chunks are prefetched, in the order of the requests of the last step. A
requested chunk goes before all expected ones; if no buffer is free, the chunk expected last is evicted for it. A link
carries both directions at once.

`StatePrefetch` launches everything on the device as soon as it is requested: waiting happens there, and nothing is
LEAVING for long. `paced_prefetch.py` launches one copy at a time.
"""

import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from shardwise.cost.memory import DEFERRED_FREE_BYTES
from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.packing import coalesce
from shardwise.states.tiers.staging import StagingBuffers

R = TypeVar("R", bound=Hashable)
_OfOwner = TypeVar("_OfOwner", contravariant=True)


class Incoming(NamedTuple):
    """What comes to a staging buffer, from where it lives; and what else there has to be room for, like these."""

    host: list[Tensor]
    reserved: list[Tensor]


class Written(NamedTuple):
    """Events behind an update, and what it has written: where it lives, and where it is.

    `lasting` is of that what stays where it is until somebody else lets go of it.
    """

    events: list[Event]
    outgoing: list[tuple[Tensor, Tensor]]
    lasting: Sequence[Tensor] = ()


class Owner(Protocol[_OfOwner]):
    """Whose chunks they are."""

    def incoming(self, one: _OfOwner) -> Incoming:
        """What comes with a chunk now."""
        ...

    def update(self, one: _OfOwner, here: list[Tensor], after: list[Event]) -> Written:
        """Put the update of a chunk, which is here once some events are reached."""
        ...

    def is_sent(self, one: _OfOwner, events: list[Event]) -> None:
        """What was updated of a chunk is at home once these events are reached."""
        ...


class State(Enum):
    """Where a chunk is: the table above."""

    HOST = "host"
    STAGED = "staged"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class Item(Generic[R]):
    """A chunk of the owner's. `index` is its place in the order of a forward."""

    chunk: R
    index: int
    state: State = State.HOST
    #: HOST: events after which the host has the newest numbers.
    newest: list[Event] = field(default_factory=list)
    #: STAGED or LEAVING: the buffer, the tensors in it, and events after which they have come.
    buffer: int = -1
    places: list[Tensor] = field(default_factory=list)
    arrives: list[Event] = field(default_factory=list)
    #: Asked for and not updated: events behind all that was computed when it was. None if nobody asks.
    gradients: list[Event] | None = None


class StatePrefetch(Generic[R]):
    """Chunks of one owner, given in the order in which a forward uses what they update."""

    #: What went wrong beside the caller.
    error: Exception | None = None

    def __init__(self, owner: Owner[R], chunks: Iterable[R], buffers: StagingBuffers, copies: CopyStreams) -> None:
        self._owner, self._buffers, self._copies = owner, buffers, copies
        self.lock = threading.Condition()
        self._items = {one: Item(one, index) for index, one in enumerate(chunks)}
        #: The order in which a step is expected to ask. A backward goes the other way.
        self._order = list(reversed(self._items.values()))
        self.is_open = False
        #: In order: those this step is expected to ask for and that have not come, those it has asked for, those of
        #: them that are not updated, and those that are STAGED.
        self._expected: dict[Item[R], None] = {}
        self._given: dict[Item[R], None] = {}
        self._asked: dict[Item[R], None] = {}
        self._staged: dict[Item[R], None] = {}
        #: Memory that an optimizer has taken by itself, and that goes home.
        self._own_memory = DeferredFree(DEFERRED_FREE_BYTES)

    def state_of(self, one: R) -> State:
        """Where a chunk is."""
        return self._items[one].state

    def was_asked(self, one: R) -> bool:
        """Whether this step has asked for a chunk."""
        return self._items[one] in self._given

    def begin(self) -> None:
        """A step begins: the first chunks come."""
        with self.lock:
            if not self.is_open:
                self.is_open = True
                self._expected = {item: None for item in self._order if item not in self._given}
            self._advance()

    def ask(self, chunks: Iterable[R]) -> None:
        """Update these as soon as they are here, and after all that is computed by now."""
        with self.lock:
            computed = self._copies.computed()
            for item in [self._items[one] for one in chunks]:
                if item not in self._given:
                    self._settle([item])
                    item.gradients = computed
                    self._asked[item] = self._given[item] = None
                    self._expected.pop(item, None)
            self._advance()

    def end(self) -> None:
        """A step has asked for all that it will. The next one is expected to ask in the same order."""
        with self.lock:
            self._order = [*self._given, *(item for item in self._order if item not in self._given)]
            self._given.clear()
            self._close_step()

    def settle(self, chunks: Iterable[R]) -> None:
        """Have the updates put of those that were asked for."""
        with self.lock:
            self._settle([self._items[one] for one in chunks])

    def forget(self) -> None:
        """What is staged, or on its way, is old. Nothing is under way but that."""
        with self.lock:
            self._close_step()

    def wait(self) -> None:
        """Wait until all that was updated is at home."""
        for event in [event for item in self._items.values() for event in item.newest]:
            event.wait()
        self._own_memory.wait()

    def close(self) -> None:
        """Let go of the staging buffers."""
        self.wait()
        for item in list(self._staged):
            for event in item.arrives:
                event.wait()
            self._drop(item)
        self._buffers.clear()

    # What `paced_prefetch.py` does otherwise.

    def _advance(self) -> None:
        """Update what is here and was asked for, and have others come, until there is nothing left to be told."""
        for item in [each for each in self._asked if each.state is State.STAGED]:
            self._update(item)
        while (following := self._next()) is not None:
            self._bring(following)
            if following.gradients is not None:
                self._update(following)

    def _settle(self, items: Iterable[Item[R]]) -> None:
        """Nothing that was asked for is put later."""

    def _choose(self, wanted: Sequence[Item[R]]) -> Item[R]:
        """Of several that were asked for, the one that comes first."""
        return wanted[0]

    def _send(self, item: Item[R], written: Written) -> None:
        """LEAVING: have go home what was written. What comes next to the buffer, or from the host, waits for that."""
        pairs = coalesce(written.outgoing)
        back = [self._copies.to_host_after(host, here, written.events) for host, here in pairs][-1:]
        own = self._own_memory_of(item, written)
        if own:
            self._own_memory.hold(back[0], *own)
            self._own_memory.sweep()
        item.newest = back or written.events
        self._at_host(item, gone=item.newest)
        self._owner.is_sent(item.chunk, back)

    # ---------------------------------------------------------------------------------------------------------------

    def _own_memory_of(self, item: Item[R], written: Written) -> list[Tensor]:
        """Memory that an optimizer has taken by itself, as in its first step. It is nobody's when it was copied."""
        lasting = {id(each) for each in written.lasting}
        every = [here for _, here in written.outgoing if id(here) not in lasting]
        return [here for here in every if not self._buffers.has(item.buffer, here)]

    def _next(self) -> Item[R] | None:
        """The chunk that is to come next: one that was asked for, or else the one that is expected to be."""
        wanted = [item for item in self._asked if item.state is State.HOST]
        if wanted:
            if not self._buffers.are_free:
                self._make_room()
            return self._choose(wanted) if self._buffers.are_free else None
        if not self.is_open or not self._buffers.are_free:
            return None
        expected = (item for item in self._expected if item.gradients is None and item.state is State.HOST)
        return next(expected, None)

    def _make_room(self) -> None:
        """Have the chunk that came last, of those that nobody asked for, leave as it is."""
        item = next((each for each in reversed(self._staged) if each.gradients is None), None)
        if item is not None:
            self._drop(item)
            self._expected = {item: None, **self._expected}

    def _close_step(self) -> None:
        self.is_open = False
        for item in [each for each in self._staged if each.gradients is None]:
            self._drop(item)

    def _drop(self, item: Item[R]) -> None:
        """STAGED to HOST: nothing was written."""
        del self._staged[item]
        self._at_host(item, gone=item.arrives)

    def _at_host(self, item: Item[R], gone: Sequence[Event]) -> None:
        """Its buffer is free once some events are reached."""
        self._buffers.give_back(item.buffer, gone)
        item.state, item.buffer, item.places, item.arrives = State.HOST, -1, [], []

    def _bring(self, item: Item[R]) -> None:
        """HOST to STAGED."""
        incoming = self._owner.incoming(item.chunk)
        item.buffer, item.places, after = self._buffers.take([*incoming.host, *incoming.reserved])
        after = [*after, *item.newest]
        pairs = coalesce(zip(item.places, incoming.host, strict=False))
        item.arrives = [self._copies.to_device(place, host, after) for place, host in pairs][-1:] or after
        item.state = State.STAGED
        self._staged[item] = None
        if item.gradients is None:  # Else it comes for the step before, and is expected once more.
            self._expected.pop(item, None)

    def _update(self, item: Item[R]) -> None:
        """STAGED to LEAVING: it was asked for."""
        assert item.gradients is not None, "somebody asked for it"
        gradients, item.gradients = item.gradients, None
        del self._asked[item], self._staged[item]
        item.state = State.LEAVING
        written = self._owner.update(item.chunk, item.places, [*gradients, *item.arrives])
        if written.events or written.outgoing:
            self._send(item, written)
        else:
            self._at_host(item, gone=item.arrives)
