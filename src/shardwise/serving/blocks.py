"""KV blocks: which are in use and by how many, which are free, and which hold a prefix that can be reused.

A block holds the keys and values of `block_size` tokens, of all layers, in contiguous bytes. This module handles block
numbers only; `kv_cache.py` has the bytes. A full block has a name: a hash of its tokens and of the name of the block
before it, so that two blocks with one name hold the same prefix.

| state | users | name | it is | left by |
|---|---|---|---|---|
| free | 0 | no | in the list of free blocks | `allocate` -> filling |
| filling | 1 | no | owned by one sequence, which writes into it | `fill` -> full; `release` -> free |
| full | 1 or more | yes | read by all sequences with that prefix | `release` by the last user -> cached |
| cached | 0 | yes | last in the eviction order | `take` -> full; `allocate` of the oldest -> filling |

If another block has its name already, a block stays filling even when it is full: it will never be looked up.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from hashlib import blake2b

import numpy as np

#: Bytes of a name. With 16, two prefixes with one name are not to be expected in the life of any machine.
NAME_BYTES = 16


class State(Enum):
    FREE = "free"
    FILLING = "filling"
    FULL = "full"
    CACHED = "cached"


def first_name(model: str, salt: str) -> bytes:
    """Return the root of a sequence's chain of names: blocks are shared within one model and one salt."""
    return blake2b(f"{model}\0{salt}".encode(), digest_size=NAME_BYTES).digest()


def next_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the name of a block with these tokens that follows the block named `before`."""
    return blake2b(before + np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=NAME_BYTES).digest()


class BlockPool:
    """All blocks of one cache. `on_evict(block, name)` is called while the block's bytes are still valid; `on_drop()`
    is called before named blocks become free without an `on_evict`."""

    def __init__(self, num_blocks: int, block_size: int, on_evict: Callable[[int, bytes], None] | None = None) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.on_evict = on_evict
        self.on_drop: Callable[[], None] | None = None
        self._users: list[int]
        self._names: list[bytes | None]
        self._by_name: dict[bytes, int]
        self._free: list[int]
        #: Oldest first.
        self._cached: OrderedDict[int, None]
        self.clear()

    def clear(self) -> None:
        """Make all blocks free, whatever their state: their bytes are lost."""
        self._drop()
        self._users = [0] * self.num_blocks
        self._names = [None] * self.num_blocks
        self._by_name = {}
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._cached = OrderedDict()

    @property
    def num_available(self) -> int:
        """How many blocks can be allocated now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """How many blocks are free, so that allocating them evicts nothing."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def state(self, block: int) -> State:
        if self._users[block]:
            return State.FILLING if self._names[block] is None else State.FULL
        return State.FREE if self._names[block] is None else State.CACHED

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest known prefix of this chain. They are not reserved until `take`."""
        found = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks are cached: taking them reduces the number that can be allocated."""
        return sum(not self._users[block] for block in blocks)

    def take(self, block: int) -> None:
        """Add a user to a block that has a name."""
        assert self._names[block] is not None, f"block {block} has no name to be found by"
        if not self._users[block]:
            del self._cached[block]
        self._users[block] += 1

    def allocate(self) -> int:
        """Return a block to be filled: a free one, or the least recently used cached one, which is evicted."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._cached, "whoever allocates has looked whether there is one"
            block, _ = self._cached.popitem(last=False)
            name = self._names[block]
            assert name is not None, f"cached block {block} has no name"
            if self.on_evict is not None:
                self.on_evict(block, name)
            del self._by_name[name]
            self._names[block] = None
        self._users[block] = 1
        return block

    def next_to_go(self) -> Iterator[tuple[int, bytes]]:
        """Yield cached blocks with their names, in the order in which they will be evicted."""
        for block in self._cached:
            name = self._names[block]
            assert name is not None, f"cached block {block} has no name"
            yield block, name

    def fill(self, block: int, name: bytes) -> None:
        """Mark a block as full, so that it can be found by its name."""
        assert self.state(block) is State.FILLING, f"block {block} is {self.state(block).value}, not being filled"
        if name not in self._by_name:
            self._names[block] = name
            self._by_name[name] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user from each block. A sequence's last blocks are evicted first: others may share its beginning."""
        for block in reversed(blocks):
            assert self._users[block] > 0, f"block {block} is nobody's"
            self._users[block] -= 1
            if not self._users[block]:
                if self._names[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def forget(self) -> None:
        """Forget all cached blocks, because the weights have changed or a benchmark needs a cold cache."""
        self._drop()
        for block in self._cached:
            name = self._names[block]
            assert name is not None, f"cached block {block} has no name"
            del self._by_name[name]
            self._names[block] = None
        self._free.extend(self._cached)
        self._cached.clear()

    def _drop(self) -> None:
        if self.on_drop is not None:
            self.on_drop()
