"""Eviction policies: least recently used (LRU), recency and frequency (ARC), next use (Belady).

ARC is that of Megiddo and Modha (FAST 2003), counted in bytes instead of pages. It keeps two lists: copies used once,
and copies used more often. A miss on a copy that was recently evicted from one list makes that list longer.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from shardwise.dataflow.data import Copy, Data
from shardwise.errors import unknown


class LeastRecentlyUsed:
    """LRU: the copy that was used longest ago goes first."""

    def __init__(self) -> None:
        self._copies: dict[Copy, None] = {}  # In order of use: a dictionary keeps the order of insertion.

    def add(self, copy: Copy) -> None:
        """Add a copy that has just been made."""
        self._copies[copy] = None

    def touch(self, copy: Copy) -> None:
        """Note that a copy has been used."""
        if copy in self._copies:
            del self._copies[copy]
            self._copies[copy] = None

    def remove(self, copy: Copy, *, evicted: bool) -> None:  # noqa: ARG002 - both are forgotten
        """Remove a copy that was evicted for lack of room, or dropped."""
        self._copies.pop(copy, None)

    def order(self) -> Iterable[Copy]:
        """Return all copies in the order of eviction."""
        return list(self._copies)


class AdaptiveReplacement:
    """ARC: once-used and often-used copies, with a target size for the once-used that adapts to misses."""

    def __init__(self) -> None:
        self._once: dict[Copy, None] = {}
        self._often: dict[Copy, None] = {}
        # Ghost entries: the data evicted from each list, with their bytes; and the target bytes of the once-used list.
        self._missed_once: dict[int, int] = {}
        self._missed_often: dict[int, int] = {}
        self._target_bytes = 0.0

    def add(self, copy: Copy) -> None:
        number, size = _number_of(copy), copy.num_bytes
        if number in self._missed_once:
            weight = max(1.0, _bytes_of(self._missed_often) / max(1, _bytes_of(self._missed_once)))
            self._target_bytes = min(self._target_bytes + weight * size, self._most_bytes() + size)
            del self._missed_once[number]
            self._often[copy] = None
        elif number in self._missed_often:
            weight = max(1.0, _bytes_of(self._missed_once) / max(1, _bytes_of(self._missed_often)))
            self._target_bytes = max(self._target_bytes - weight * size, 0.0)
            del self._missed_often[number]
            self._often[copy] = None
        else:
            self._once[copy] = None

    def touch(self, copy: Copy) -> None:
        if copy in self._once:
            del self._once[copy]
            self._often[copy] = None
        elif copy in self._often:
            del self._often[copy]
            self._often[copy] = None

    def remove(self, copy: Copy, *, evicted: bool) -> None:
        was_once = copy in self._once
        self._once.pop(copy, None)
        self._often.pop(copy, None)
        if evicted:
            missed = self._missed_once if was_once else self._missed_often
            missed[_number_of(copy)] = copy.num_bytes
            # Each ghost list remembers no more bytes than are held.
            while len(missed) > 1 and _bytes_of(missed) > self._most_bytes() + copy.num_bytes:
                del missed[next(iter(missed))]

    def order(self) -> Iterable[Copy]:
        once_bytes = sum(copy.num_bytes for copy in self._once)
        first, second = (self._once, self._often) if once_bytes > self._target_bytes else (self._often, self._once)
        return list(chain(first, second))

    def _most_bytes(self) -> int:
        return sum(copy.num_bytes for copy in chain(self._once, self._often))


class NextUse(LeastRecentlyUsed):
    """The copy whose next use is farthest goes first, which is optimal (Belady 1966). Outside of a program, LRU."""

    def __init__(self, position: Callable[[], tuple[int, int]]) -> None:
        super().__init__()
        self._position = position  # The position in the running program, and the program's length.

    def order(self) -> Iterable[Copy]:
        position, length = self._position()
        # Sorting is stable, so ties stay in LRU order.
        return sorted(super().order(), key=lambda copy: -_next_use(copy.owner(), position, length))


#: An eviction policy.
Policy = LeastRecentlyUsed | AdaptiveReplacement


def make_policy(name: str, position: Callable[[], tuple[int, int]]) -> Policy:
    """Make a policy by name: `lru`, `arc` or `next-use`."""
    makers: dict[str, Callable[[], Policy]] = {
        "lru": LeastRecentlyUsed,
        "arc": AdaptiveReplacement,
        "next-use": partial(NextUse, position),
    }
    if name not in makers:
        raise unknown("eviction", name, list(makers))
    return makers[name]()


def _next_use(data: Data | None, position: int, length: int) -> float:
    if data is None or not data.uses:
        return float("inf")
    later = bisect_right(data.uses, position)
    # A program is replayed, so its beginning follows its end.
    return data.uses[later] if later < len(data.uses) else data.uses[0] + length


def _number_of(copy: Copy) -> int:
    data = copy.owner()
    return -1 if data is None else data.number


def _bytes_of(missed: dict[int, int]) -> int:
    return sum(missed.values())
