"""Optimizer-state prefetch: chunks of host state are copied to the device, updated there, and copied back.

    compute   forward | backward, gradients of 3, 2, 1, 0 | forward of 0, 1, 2, 3
    in        s3 s2        s1  s0                              ahead of its turn, as far as there are staging buffers
    update                 3   2   1   0                       when it was requested and is here
    out                        s3  s2  s1  s0                  while others come

A chunk is the content of one staging buffer: it is updated together and copied back. Its states:

    state      its numbers are                            left by
    HOST       on the host, once `newest` is reached      bring: STAGED
    STAGED     in a staging buffer, once `arrives` is     update: LEAVING, or HOST if nothing was written; drop: HOST
    LEAVING    written, and their copy to be launched     send: HOST

In addition a chunk may be expected (it was requested in the last step), and requested (its gradients are final, or will
be once `gradients` is reached). Expected chunks are prefetched, in the order of the requests of the last step. A
requested chunk goes before all expected ones; if no buffer is free, the chunk expected last is evicted for it. A link
carries both directions at once.

`StatePrefetch` launches everything on the device as soon as it is requested: waiting happens there, and nothing is
LEAVING for long. `threaded_prefetch.py` launches one copy at a time.
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
    """What is copied into a staging buffer, from where it lives; and tensors like those that need space there too."""

    host: list[Tensor]
    reserved: list[Tensor]


class Written(NamedTuple):
    """Events after an update, and what it has written: where it lives, and where it is.

    `lasting` is the part that stays where it is until another owner frees it.
    """

    events: list[Event]
    outgoing: list[tuple[Tensor, Tensor]]
    lasting: Sequence[Tensor] = ()
    #: How many of the first ones outgoing are weights: beside them are others, and no padding.
    num_weights: int = 0

    @property
    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """What is outgoing, in few copies."""
        weights, states = self.outgoing[: self.num_weights], self.outgoing[self.num_weights :]
        return [*coalesce(weights, is_padded=False), *coalesce(states)]


class Owner(Protocol[_OfOwner]):
    """The owner of chunks."""

    def incoming(self, one: _OfOwner) -> Incoming:
        """Return what is copied for a chunk now."""
        ...

    def update(self, one: _OfOwner, here: list[Tensor], after: list[Event]) -> Written:
        """Launch the update of a chunk, which is here once these events are reached."""
        ...

    def is_sent(self, one: _OfOwner, events: list[Event]) -> None:
        """Record that the updates of a chunk are on the host once these events are reached."""
        ...


class State(Enum):
    """The state of a chunk: see the table above."""

    HOST = "host"
    STAGED = "staged"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class Item(Generic[R]):
    """A chunk of the owner. `index` is its position in the order of a forward."""

    chunk: R
    index: int
    state: State = State.HOST
    #: HOST: events after which the host has the newest values.
    newest: list[Event] = field(default_factory=list)
    #: STAGED or LEAVING: the buffer, the tensors in it, and events after which they have arrived.
    buffer: int = -1
    places: list[Tensor] = field(default_factory=list)
    arrives: list[Event] = field(default_factory=list)
    #: Requested and not updated: events after all computation launched before the request. None if not requested.
    gradients: list[Event] | None = None


class StatePrefetch(Generic[R]):
    """The chunks of one owner, in the order in which a forward uses the weights that they update."""

    #: The error of a background thread.
    error: Exception | None = None

    def __init__(self, owner: Owner[R], chunks: Iterable[R], buffers: StagingBuffers, copies: CopyStreams) -> None:
        self._owner, self._buffers, self._copies = owner, buffers, copies
        self.lock = threading.Condition()
        self._items = {one: Item(one, index) for index, one in enumerate(chunks)}
        #: The expected order of requests in a step. A backward is in reverse.
        self._order = list(reversed(self._items.values()))
        self.is_open = False
        #: In order: expected chunks that have not arrived, requested ones, requested ones that are not updated, and
        #: those that are STAGED.
        self._expected: dict[Item[R], None] = {}
        self._given: dict[Item[R], None] = {}
        self._asked: dict[Item[R], None] = {}
        self._staged: dict[Item[R], None] = {}
        #: Memory that an optimizer has allocated itself and that is copied to the host.
        self._own_memory = DeferredFree(DEFERRED_FREE_BYTES)

    def state_of(self, one: R) -> State:
        """Return the state of a chunk."""
        return self._items[one].state

    def was_asked(self, one: R) -> bool:
        """Whether this step has asked for a chunk."""
        return self._items[one] in self._given

    def begin(self) -> None:
        """Begin a step: start to prefetch the first chunks."""
        with self.lock:
            if not self.is_open:
                self.is_open = True
                self._expected = {item: None for item in self._order if item not in self._given}
            self._advance()

    def ask(self, chunks: Iterable[R]) -> None:
        """Update these as soon as they are here, and after all computation launched so far."""
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
        """End the requests of a step. The next one is expected to make them in the same order."""
        with self.lock:
            self._order = [*self._given, *(item for item in self._order if item not in self._given)]
            self._given.clear()
            self._close_step()

    def settle(self, chunks: Iterable[R]) -> None:
        """Launch the updates of requested chunks."""
        with self.lock:
            self._settle([self._items[one] for one in chunks])

    def forget(self) -> None:
        """Drop what is staged or in transit: it is outdated. Nothing else is in progress."""
        with self.lock:
            self._close_step()

    def wait(self) -> None:
        """Wait until all updates are on the host."""
        for event in [event for item in self._items.values() for event in item.newest]:
            event.wait()
        self._own_memory.wait()

    def close(self) -> None:
        """Release the staging buffers."""
        self.wait()
        for item in list(self._staged):
            for event in item.arrives:
                event.wait()
            self._drop(item)
        self._buffers.clear()

    # Overridden by `threaded_prefetch.py`.

    def _advance(self) -> None:
        """Update requested chunks that are here, and prefetch others, until there is nothing left to launch."""
        for item in [each for each in self._asked if each.state is State.STAGED]:
            self._update(item)
        while (following := self._next()) is not None:
            self._bring(following)
            if following.gradients is not None:
                self._update(following)

    def _settle(self, items: Iterable[Item[R]]) -> None:
        """Do nothing: all requested updates are launched at once."""

    def _choose(self, wanted: Sequence[Item[R]]) -> Item[R]:
        """Return the requested chunk to copy first."""
        return wanted[0]

    def _send(self, item: Item[R], written: Written) -> None:
        """LEAVING: copy back what was written. Later use of the buffer, or of the host's values, waits for that."""
        back = [self._copies.to_host_after(host, here, written.events) for host, here in written.copies][-1:]
        own = self._own_memory_of(item, written)
        if own:
            self._own_memory.hold(back[0], *own)
            self._own_memory.sweep()
        item.newest = back or written.events
        self._at_host(item, gone=item.newest)
        self._owner.is_sent(item.chunk, back)

    # ---------------------------------------------------------------------------------------------------------------

    def _own_memory_of(self, item: Item[R], written: Written) -> list[Tensor]:
        """Return memory that an optimizer has allocated itself, as in its first step. It is free after the copy."""
        lasting = {id(each) for each in written.lasting}
        every = [here for _, here in written.outgoing if id(here) not in lasting]
        return [here for here in every if not self._buffers.has(item.buffer, here)]

    def _next(self) -> Item[R] | None:
        """Return the chunk to copy next: a requested one, otherwise the next expected one."""
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
        """Evict the chunk that arrived last, of those not requested."""
        item = next((each for each in reversed(self._staged) if each.gradients is None), None)
        if item is not None:
            self._drop(item)
            self._expected = {item: None, **self._expected}

    def _close_step(self) -> None:
        self.is_open = False
        for item in [each for each in self._staged if each.gradients is None]:
            self._drop(item)

    def _drop(self, item: Item[R]) -> None:
        """STAGED to HOST without a copy: nothing was written."""
        del self._staged[item]
        self._at_host(item, gone=item.arrives)

    def _at_host(self, item: Item[R], gone: Sequence[Event]) -> None:
        """Free its buffer once these events are reached."""
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
        if item.gradients is None:  # Otherwise it is for the last step, and is expected once more.
            self._expected.pop(item, None)

    def _update(self, item: Item[R]) -> None:
        """STAGED to LEAVING: update a requested chunk."""
        assert item.gradients is not None, "somebody asked for it"
        gradients, item.gradients = item.gradients, None
        del self._asked[item], self._staged[item]
        item.state = State.LEAVING
        written = self._owner.update(item.chunk, item.places, [*gradients, *item.arrives])
        if written.events or written.outgoing:
            self._send(item, written)
        else:
            self._at_host(item, gone=item.arrives)
