"""What lives on the host visits the device to be updated there: the one mover of rounds.

    compute   forward | backward, gradients of 3, 2, 1, 0 | forward of 0, 1, 2, 3
    in        s3 s2        s1  s0                              ahead of its turn, as far as there are slots
    update                 3   2   1   0                       when somebody asks for it and it is here
    out                        s3  s2  s1  s0                  while others come

A round is what comes into one slot, is updated at once and goes home. Those that are expected come ahead, in the order
in which they were asked for in the last step. One that is asked for comes before all that are expected, and if no slot
is left, the one that is expected last makes room for it. A link carries both ways at once.

`Visits` tells the device of everything as soon as it is asked: what has to wait does so there. `paced_prefetch.py`
tells it of one copy after the other.
"""

import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from shardwise.cost.memory import DEFERRED_FREE_BYTES
from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import Crossing
from shardwise.states.tiers.staging import Slots, in_runs

R = TypeVar("R", bound=Hashable)
_OfOwner = TypeVar("_OfOwner", contravariant=True)


class Homes(NamedTuple):
    """What comes to a slot, from where it lives; and what else there has to be room for, in tensors like these."""

    coming: list[Tensor]
    room: list[Tensor]


class Written(NamedTuple):
    """Marks behind an update, and what it has written: where it lives, and where it is."""

    marks: list[Event]
    leaving: list[tuple[Tensor, Tensor]]


class Owner(Protocol[_OfOwner]):
    """Whose rounds they are."""

    def homes_of(self, one: _OfOwner) -> Homes:
        """What comes with a round now."""
        ...

    def update(self, one: _OfOwner, here: list[Tensor], after: list[Event]) -> Written:
        """Put the update of a round, which is here once some marks are reached."""
        ...

    def is_sent(self, one: _OfOwner, marks: list[Event]) -> None:
        """What was updated of a round is at home once these marks are reached."""
        ...


class Here(NamedTuple):
    """A round that is in a slot, or on its way there."""

    slot: int
    places: list[Tensor]
    arrives: list[Event]


class Visits(Generic[R]):
    """Rounds of one owner, given in the order in which a forward uses what they update."""

    #: What went wrong beside the caller.
    error: Exception | None = None

    def __init__(self, owner: Owner[R], rounds: Iterable[R], slots: Slots, crossing: Crossing) -> None:
        self._owner, self._slots, self._crossing = owner, slots, crossing
        self.lock = threading.Condition()
        self._number = {one: number for number, one in enumerate(rounds)}
        #: The order in which a step is expected to ask. A backward goes the other way.
        self._order = list(reversed(self._number))
        self.is_open = False
        #: Those that this step is expected to ask for and that have not come, and those it has asked for, in order.
        self._coming: dict[R, None] = {}
        self.given: dict[R, None] = {}
        #: Those that were asked for and are not updated, and marks behind all that came before; those that are here.
        self._asked: dict[R, list[Event]] = {}
        self._here: dict[R, Here] = {}
        #: When those that were updated are at home.
        self._back: dict[R, list[Event]] = {}
        self._apart = DeferredFree(DEFERRED_FREE_BYTES)

    def begin(self) -> None:
        """A step begins: the first rounds come."""
        with self.lock:
            if not self.is_open:
                self.is_open = True
                self._coming = {one: None for one in self._order if one not in self.given}
            self._advance()

    def ask(self, rounds: Iterable[R]) -> None:
        """Update these as soon as they are here, and after all that is computed by now."""
        with self.lock:
            used = self._crossing.computed()
            for one in rounds:
                if one not in self.given:
                    self._settle([one])
                    self._asked[one] = used
                    self.given[one] = None
                    self._coming.pop(one, None)
            self._advance()

    def end(self) -> None:
        """A step has asked for all that it will. The next one is expected to ask in the same order."""
        with self.lock:
            self._order = [*self.given, *(one for one in self._order if one not in self.given)]
            self.given.clear()
            self.is_open = False
            self._drop()

    def settle(self, rounds: Iterable[R]) -> None:
        """Have the updates put of those that were asked for."""
        with self.lock:
            self._settle(rounds)

    def forget(self) -> None:
        """What is here, or on its way, is old. Nothing is under way but that."""
        with self.lock:
            self.is_open = False
            self._drop()

    def wait(self) -> None:
        """Wait until all that was updated is at home."""
        for mark in [mark for marks in self._back.values() for mark in marks]:
            mark.wait()
        self._apart.wait()

    def close(self) -> None:
        """Let go of the slots."""
        self.wait()
        for here in self._here.values():
            for mark in here.arrives:
                mark.wait()
        self._here.clear()
        self._slots.clear()

    # What `paced_prefetch.py` does otherwise.

    def _advance(self) -> None:
        """Update what is here and was asked for, and have others come, until there is nothing left to be told."""
        for one in [each for each in self._asked if each in self._here]:
            self._put_update(one)
        while (following := self._next()) is not None:
            self._bring(following)
            if following in self._asked:
                self._put_update(following)

    def _settle(self, rounds: Iterable[R]) -> None:
        """Nothing that was asked for is put later."""

    def _choose(self, wanted: Sequence[R]) -> R:
        """Of several that were asked for, the one that comes first."""
        return wanted[0]

    def _send(self, one: R, slot: int, written: Written) -> None:
        """Have go home what was written."""
        back = [self._crossing.homeward(home, here, written.marks) for home, here in in_runs(written.leaving)][-1:]
        apart = self._apart_of(slot, written)
        if apart:
            self._apart.hold(back[0], *apart)
            self._apart.sweep()
        self._back[one] = back or written.marks
        self._slots.give_back(slot, self._back[one])
        self._owner.is_sent(one, back)

    def _is_home(self, one: R) -> bool:  # noqa: ARG002 - what leaves it is put before it comes
        """Whether a round could be told to come."""
        return True

    # ---------------------------------------------------------------------------------------------------------------

    def _apart_of(self, slot: int, written: Written) -> list[Tensor]:
        """Memory that an optimizer has taken by itself, as in its first step. It is nobody's when it was copied."""
        return [here for _, here in written.leaving if not self._slots.has(slot, here)]

    def _next(self) -> R | None:
        """The round that is to come next: one that was asked for, or else the one that is expected to be."""
        wanted = [one for one in self._asked if one not in self._here and self._is_home(one)]
        if wanted:
            if not self._slots.are_free:
                self._make_room()
            return self._choose(wanted) if self._slots.are_free else None
        if not self.is_open or not self._slots.are_free:
            return None
        return next((one for one in self._coming if one not in self._asked and self._is_home(one)), None)

    def _make_room(self) -> None:
        """Have the round that came last, of those that nobody asked for, leave as it is."""
        one = next((one for one in reversed(self._here) if one not in self._asked), None)
        if one is not None:
            self._give_up(one)
            self._coming = {one: None, **self._coming}

    def _give_up(self, one: R) -> None:
        here = self._here.pop(one)
        self._slots.give_back(here.slot, here.arrives)

    def _drop(self) -> None:
        for one in [each for each in self._here if each not in self._asked]:
            self._give_up(one)

    def _bring(self, one: R) -> None:
        homes = self._owner.homes_of(one)
        slot, places, after = self._slots.take([*homes.coming, *homes.room])
        pairs = in_runs(zip(places, homes.coming, strict=False))
        after = [*after, *self._back.get(one, ())]
        arrives = [self._crossing.inward(place, home, after) for place, home in pairs][-1:]
        self._here[one] = Here(slot, places, arrives or after)
        if one not in self._asked:  # Else it comes for the step before, and is expected once more.
            self._coming.pop(one, None)

    def _put_update(self, one: R) -> None:
        used, (slot, places, arrives) = self._asked.pop(one), self._here.pop(one)
        written = self._owner.update(one, places, [*used, *arrives])
        if written.marks or written.leaving:
            self._send(one, slot, written)
        else:
            self._slots.give_back(slot, arrives)
