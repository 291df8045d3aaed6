"""Who leaves a full tier: by recency and frequency (ARC).

ARC is that of Megiddo and Modha (FAST 2003). Names asked for once and names asked for again are two lists; a name that
comes back soon after it had to leave one of them makes that list longer. `benchmarks/kv_eviction.py` compares it with
leaving in the order of last use: as good where talks go on in turns (2 % fewer hits), 1.6 to 3 times the hits where
shared beginnings meet many that are seen once.
"""

from collections import OrderedDict
from collections.abc import Iterator


class Arc:
    """The names in a tier that has room for `size` of them.

    `T1` and `T2` of the paper are `once` and `again`; `B1` and `B2`, names without bytes, are those that left.
    """

    def __init__(self, size: int) -> None:
        self._size, self._target = size, 0.0
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._left_once: OrderedDict[bytes, None] = OrderedDict()
        self._left_again: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, name: object) -> bool:
        return name in self._once or name in self._again

    def __iter__(self) -> Iterator[bytes]:
        yield from self._once
        yield from self._again

    def add(self, name: bytes) -> None:
        """A name comes; there is room for it."""
        if name in self._left_once:
            self._target = min(self._target + max(1.0, len(self._left_again) / len(self._left_once)), self._size)
            del self._left_once[name]
            self._again[name] = None
        elif name in self._left_again:
            self._target = max(self._target - max(1.0, len(self._left_once) / len(self._left_again)), 0.0)
            del self._left_again[name]
            self._again[name] = None
        else:
            self._once[name] = None

    def touch(self, name: bytes) -> None:
        """A name was asked for."""
        if name in self._once:
            del self._once[name]
            self._again[name] = None
        else:
            self._again.move_to_end(name)

    def renew(self, name: bytes) -> None:
        """A name comes that is there: it goes as late as a new one, and nobody has asked for it."""
        (self._once if name in self._once else self._again).move_to_end(name)

    def evict(self) -> bytes:
        """Take out who goes first."""
        from_once = bool(self._once) and (len(self._once) > self._target or not self._again)
        held, left = (self._once, self._left_once) if from_once else (self._again, self._left_again)
        name, _ = held.popitem(last=False)
        left[name] = None
        # No more is remembered than could have been held.
        while len(self._left_once) + len(self._once) > self._size and self._left_once:
            self._left_once.popitem(last=False)
        while len(self._left_again) > self._size:
            self._left_again.popitem(last=False)
        return name

    def remove(self, name: bytes) -> None:
        """A name is gone by itself."""
        self._once.pop(name, None)
        self._again.pop(name, None)
