"""Which block leaves a full tier: by recency and frequency (ARC).

ARC is that of Megiddo and Modha (FAST 2003). It keeps two lists: names requested once, and names requested again. A
name that is requested soon after it was evicted from one list makes that list longer. `benchmarks/kv_eviction.py`
compares it with LRU: about as good for alternating conversations (2 % fewer hits), and 1.6 to 3 times the hits where
shared prefixes compete with many that are seen once.
"""

from collections import OrderedDict
from collections.abc import Iterator


class Arc:
    """The names in a tier that has room for `size` of them.

    `T1` and `T2` of the paper are `once` and `again`; `B1` and `B2`, ghost entries without bytes, are the evicted ones.
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
        """Add a name; there must be room for it."""
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
        """Note that a name was requested."""
        if name in self._once:
            del self._once[name]
            self._again[name] = None
        else:
            self._again.move_to_end(name)

    def renew(self, name: bytes) -> None:
        """Move a name that is put again to the position of a new one, without counting it as requested."""
        (self._once if name in self._once else self._again).move_to_end(name)

    def evict(self) -> bytes:
        """Remove and return the name to evict."""
        from_once = bool(self._once) and (len(self._once) > self._target or not self._again)
        held, left = (self._once, self._left_once) if from_once else (self._again, self._left_again)
        name, _ = held.popitem(last=False)
        left[name] = None
        # The ghost entries are bounded by what the tier could have held.
        while len(self._left_once) + len(self._once) > self._size and self._left_once:
            self._left_once.popitem(last=False)
        while len(self._left_again) > self._size:
            self._left_again.popitem(last=False)
        return name

    def remove(self, name: bytes) -> None:
        """Remove a name that was not evicted, such as one whose file is damaged."""
        self._once.pop(name, None)
        self._again.pop(name, None)
