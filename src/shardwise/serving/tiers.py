"""What lies beneath the cache, and when it is worth bringing back: blocks that had to leave it.

    KV cache  --evicted-->  host memory  --evicted-->  files
        ^                        |                       |
        +------- reloaded -------+-----------------------+      if that is faster than to compute them again

A block keeps its name on its way down, so a beginning is found wherever it is; no tier holds more bytes than it may.
What was reloaded stays beneath too: if it is evicted again, nothing has to be written. Here it is decided, block by
block; `tier_store.py` has the bytes, of one device or on every rank. All of it belongs to the thread that steps the
engine, so a block is never read while it is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from shardwise.serving.blocks import BlockPool

#: Of so many refusals one is tried all the same: what was slow once may be fast by now.
_TRY_AGAIN = 64
#: Blocks that are brought at once, from the host, and from files.
_MANY, _SOME = 1 << 30, 8


class Store(Protocol):
    """Where the bytes are: a `TierStore`, or those of all ranks."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def host_usage(self) -> float: ...

    def tiers_of(self, names: Sequence[bytes]) -> list[str]: ...

    def count_known(self, names: Sequence[bytes]) -> int:
        """How many of the first of these may lie here. It changes nothing, and any thread may ask."""

    def put(self, block: int, name: bytes) -> bool: ...

    def bring(self, wanted: Sequence[tuple[bytes, int]]) -> int: ...

    def least_seconds(self, num_blocks: int) -> float:
        """What so many take at least to arrive, where `bring` does not wait for them."""

    def prefetch(self, names: Sequence[bytes]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Speeds:
    """Seconds of one block, by what is done to it: as measured, late measurements counting most."""

    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, what: str, num_blocks: float, seconds: float) -> None:
        found = seconds / num_blocks
        before = self.seconds.get(what)
        self.seconds[what] = found if before is None else 0.8 * before + 0.2 * found


class Tiers:
    """Host and files beneath one cache. `measured=False` reloads whatever is there, for tests."""

    def __init__(self, store: Store, pool: BlockPool, *, measured: bool = True) -> None:
        self.store, self._pool, self.speeds = store, pool, Speeds()
        self._measured, self._num_refused = measured, 0
        self.loaded_bytes = self.stored_bytes = 0
        self.load_seconds = self.store_seconds = 0.0
        pool.on_evict = self.evict

    def evict(self, block: int, name: bytes) -> None:
        """A block leaves the cache: it goes to the host, and who has to make room there to the files."""
        begun = perf_counter()
        if self.store.put(block, name):
            self.stored_bytes += self.store.block_bytes
            self.store_seconds += perf_counter() - begun

    def prefetch(self, names: Sequence[bytes]) -> None:
        """Somebody waits whose beginning has these names: what the cache has not is read ahead where it is slow."""
        missing = names[len(self._pool.find(names)) :]
        if missing and self._is_faster("files"):
            self.store.prefetch(missing)

    def reload(self, names: list[bytes]) -> list[int]:
        """Bring the first of these that are beneath, as long as that is worth it."""
        tiers = self.store.tiers_of(names)
        brought: list[int] = []
        while len(brought) < len(tiers):
            # What lies in one tier, some at once. First the blocks, whose going may send others down; then the bytes,
            # if they are still there.
            first = len(brought)
            tier = tiers[first]
            run = next((place for place in range(first, len(tiers)) if tiers[place] != tier), len(tiers)) - first
            count = min(run, self._num_worth_it(tier))
            wanted = [(name, self._pool.allocate()) for name in names[first : first + count]]
            begun = perf_counter()
            num_found = self.store.bring(wanted) if wanted else 0
            seconds = max(perf_counter() - begun, self.store.least_seconds(num_found))
            self._pool.release([block for _, block in wanted[num_found:]])
            for name, block in wanted[:num_found]:
                self._pool.fill(block, name)
                brought.append(block)
            self.load_seconds += seconds
            if num_found:
                self.speeds.note(tier, num_found, seconds)
                self.loaded_bytes += num_found * self.store.block_bytes
            if not wanted or num_found < len(wanted):
                break
        return brought

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """A step that read prompts took so long: what a block costs if it is not reloaded."""
        self.speeds.note("compute", num_tokens / self._pool.block_size, seconds)

    def load(self) -> dict[str, Any]:
        """What has moved, by the names of `Load`."""
        return {
            "kv_offload_load_bytes": self.loaded_bytes,
            "kv_offload_store_bytes": self.stored_bytes,
            "kv_offload_load_seconds": self.load_seconds,
            "kv_offload_store_seconds": self.store_seconds,
            "kv_offload_host_usage": self.store.host_usage,
        }

    def close(self) -> None:
        """What only the host has goes to the files, so that the next start finds it."""
        self.store.flush()
        self.store.close()

    def _is_faster(self, tier: str) -> bool:
        """Whether a block comes sooner than it is computed, as far as both were measured."""
        load, compute = self.speeds.seconds.get(tier), self.speeds.seconds.get("compute")
        return not self._measured or load is None or compute is None or load < compute

    def _num_worth_it(self, tier: str) -> int:
        """How many blocks may be brought before it is asked again. A slow disk is found out after a few."""
        if self._is_faster(tier):
            return _MANY if tier == "host" or not self._measured else _SOME
        self._num_refused += 1
        return 1 if self._num_refused % _TRY_AGAIN == 0 else 0
