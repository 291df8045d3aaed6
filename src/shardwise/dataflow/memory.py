"""The memory of one place: at most its budget at any time, including buffers of work that is still running.

A released buffer is still in use by work submitted before. Its next user, if it needs the same size, gets the buffer at
once and waits for that work's events, on a stream and not on the host. A buffer of another size is another allocation:
the host waits for the old buffer to become free only where the budget has no room for both.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from shardwise.dataflow.data import Copy
from shardwise.dataflow.eviction import Policy
from shardwise.dataflow.streams import Event


@dataclass(slots=True, eq=False)
class _Released:
    """A released buffer, which is free once its events are reached."""

    storage: Tensor
    num_bytes: int
    events: list[Event]


@dataclass(slots=True, eq=False)
class Memory:
    """Buffers of one place: live, and released."""

    allocate: Callable[[int], Tensor]
    free: Callable[[Tensor], None]
    policy: Policy
    budget_bytes: int | None
    live_bytes: int = 0
    used_bytes: int = 0  # Bytes of live buffers, and of released ones that have not been freed.
    peak_bytes: int = 0
    num_waits: int = 0  # How often the host had to wait for room.
    is_over: Callable[[Event], bool] = Event.is_done
    on_wait: Callable[[Event], None] = lambda event: None  # noqa: ARG005 - nothing to notify
    _released: list[_Released] = field(default_factory=list)

    def can_make_room(self, num_bytes: int) -> bool:
        """Whether a buffer fits once everything evictable has been evicted."""
        if self.budget_bytes is None:
            return True
        evictable = sum(copy.num_bytes for copy in _not_held(self.policy.order()))
        return self.live_bytes - evictable + num_bytes <= self.budget_bytes

    def victims(self, num_bytes: int) -> Iterator[Copy]:
        """Yield copies to evict until a buffer of this size fits. The caller evicts each one before the next."""
        while self.budget_bytes is not None and self.live_bytes + num_bytes > self.budget_bytes:
            candidates = list(_not_held(self.policy.order()))
            # An invalid copy costs nothing to drop.
            stale = [copy for copy in candidates if not copy.valid]
            yield (stale or candidates)[0]

    def take(self, num_bytes: int) -> tuple[Tensor, list[Event]]:
        """Return a buffer, and the events to wait for before it is written. There must be room."""
        alike = [each for each in self._released if each.num_bytes == num_bytes]
        fits = self.budget_bytes is None or self.used_bytes + num_bytes <= self.budget_bytes
        # In order of preference: a released buffer that is free already, new memory, one that will become free.
        found = next((each for each in alike if self._is_free(each)), None if fits or not alike else alike[0])
        if found is not None:
            self._released.remove(found)
            self.live_bytes += num_bytes
            return found.storage, found.events
        self._drop_until_it_fits(num_bytes)
        storage = self.allocate(num_bytes)
        self.used_bytes += num_bytes
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return storage, []

    def give_back(self, storage: Tensor, num_bytes: int, events: list[Event]) -> None:
        """Release a buffer: it becomes free once these events are reached."""
        self.live_bytes -= num_bytes
        self._released.append(_Released(storage, num_bytes, events))
        if self.budget_bytes is None:
            self._drop_done()

    def close(self) -> None:
        """Free all released buffers. All work must be over."""
        self._drop(list(self._released))

    def _drop_until_it_fits(self, num_bytes: int) -> None:
        if self.budget_bytes is None or self.used_bytes + num_bytes <= self.budget_bytes:
            return
        self._drop_done()
        while self.used_bytes + num_bytes > self.budget_bytes:
            released = self._released[0]
            self.num_waits += 1
            for event in released.events:
                event.wait()
                self.on_wait(event)
            self._drop([released])

    def _drop_done(self) -> None:
        self._drop([each for each in self._released if self._is_free(each)])

    def _is_free(self, released: _Released) -> bool:
        return all(self.is_over(event) for event in released.events)

    def _drop(self, gone: list[_Released]) -> None:
        for released in gone:
            self._released.remove(released)
            self.used_bytes -= released.num_bytes
            self.free(released.storage)


def _not_held(copies: Iterable[Copy]) -> Iterator[Copy]:
    return (copy for copy in copies if not copy.held)
