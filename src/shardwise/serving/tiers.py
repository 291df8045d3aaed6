"""The tiers below the cache, and the decision when to reload evicted blocks from them.

    KV cache  --evicted-->  host memory  --evicted-->  files
        ^                        |                       |
        +------- reloaded -------+-----------------------+      if that is faster than recomputing them

A block keeps its name on its way down, so a prefix is found in any tier. No tier exceeds its bytes. A reloaded block
also stays in its tier: if it is evicted again, nothing has to be written. This module decides, block by block;
`tier_store.py` has the bytes, of one device or on every rank. Only the thread that steps the engine uses it, so a block
is never read while it is written.
"""

from collections.abc import Sequence
from itertools import islice
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

from shardwise.serving.blocks import BlockPool
from shardwise.serving.limits import Limits
from shardwise.serving.tier_speeds import Speeds
from shardwise.serving.tier_store import make_store

#: One in this many refusals is tried anyway: a tier that was slow once may be fast by now.
_TRY_AGAIN = 64
#: Blocks that are reloaded at once: while one batch is being copied to the device, room is made for the next. From
#: files only a few, after which the decision is made again; but more of them are read ahead.
_AT_ONCE = {"host": 32, "files": 8}
_READ_AHEAD = 64
#: How much later than by recomputing everything a prompt may be ready if its blocks did not come in time from files.
_LATER = 0.02
#: Blocks that are copied out ahead while a step runs: this many, plus as many as the step fills.
_AHEAD_IN_A_STEP = 8


class Store(Protocol):
    """Where the bytes are: a `TierStore`, or those of all ranks."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def host_usage(self) -> float: ...

    def tiers_of(self, names: Sequence[bytes]) -> list[str]: ...

    def count_known(self, names: Sequence[bytes]) -> int:
        """Return how many of the first of these may be in a tier. Changes nothing; any thread may call it."""

    @property
    def copies_beside(self) -> bool:
        """Whether blocks can be copied out while steps run."""

    def put(self, block: int, name: bytes) -> bool:
        """Keep the bytes of a block. Returns whether they had to be moved."""

    def begin(self) -> None:
        """Begin the copies of all blocks that were put."""

    def let_go(self, block: int) -> None:
        """Note that a block will be overwritten from now on."""

    def bring(self, wanted: Sequence[tuple[bytes, int]], within: tuple[float, float] | None = None) -> int:
        """Load blocks by name and return how many, the first within `within[0]` seconds, others each `within[1]`."""

    def fence(self) -> None:
        """Order the next step, which may read reloaded blocks and overwrite released ones, behind their copies."""

    def settle(self) -> None:
        """Wait for all copies."""

    def least_seconds(self, num_blocks: int) -> float:
        """Return the least seconds until this many blocks arrive, where `bring` does not wait for them."""

    def prefetch(self, names: Sequence[bytes]) -> None: ...

    def stop_prefetch(self, names: Sequence[bytes]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Tiers:
    """Host and file tiers below one cache. `measured=False` reloads whatever is there, for tests."""

    def __init__(self, store: Store, pool: BlockPool, *, measured: bool = True, num_ahead: int = 0) -> None:
        self.store, self._pool, self.speeds = store, pool, Speeds(pool.block_size)
        self._measured, self._num_refused = measured, 0
        self.loaded_bytes = self.stored_bytes = 0
        self.load_seconds = self.store_seconds = 0.0
        #: How many of the cached blocks that are evicted next should be in a tier already, and how many are.
        self._num_ahead = num_ahead
        self._num_beneath = 0
        pool.on_evict, pool.on_drop = self.evict, store.settle

    def evict(self, block: int, name: bytes) -> None:
        """Move a block that leaves the cache to the host, which may evict another one to the files."""
        was_moved = self._keep(block, name)
        self.store.let_go(block)
        # It was not written ahead, as the blocks counted before it were taken meanwhile: count from the first again.
        self._num_beneath = 0 if was_moved else max(self._num_beneath - 1, 0)

    def write_ahead(self, num_tokens: int) -> None:
        """Copy out the blocks to be evicted next while a step of so many tokens runs, so that evictions do not wait."""
        lacks = self._num_ahead - self._pool.num_free - self._num_beneath
        if self.store.copies_beside and lacks > 0:
            first, count = self._num_beneath, min(lacks, num_tokens // self._pool.block_size + _AHEAD_IN_A_STEP)
            for block, name in islice(self._pool.next_to_go(), first, first + count):
                self._keep(block, name)
                self._num_beneath += 1
        self.store.begin()

    def fence(self) -> None:
        """Order the next step behind the copies that affect it."""
        self.store.fence()

    def prefetch(self, names: Sequence[bytes]) -> None:
        """Read ahead from files what the cache lacks of a waiting sequence's prefix, if that is worth it."""
        missing = names[len(self._pool.find(names)) :]
        if missing and (not self._measured or self.speeds.is_faster("files", len(missing))):
            self.store.prefetch(missing[:_READ_AHEAD])

    def reload(self, names: list[bytes]) -> list[int]:
        """Reload the first of these that are in tiers, while that is faster than recomputing. Returns the blocks."""
        tiers = self.store.tiers_of(names)
        brought: list[int] = []
        while len(brought) < len(tiers):
            # A run of blocks in one tier. Allocate first, which may evict other blocks to the tiers; then load the
            # bytes, if they are still there.
            first, tier = len(brought), tiers[len(brought)]
            end = next((place for place in range(first, len(tiers)) if tiers[place] != tier), len(tiers))
            found = self._reload_run(tier, names[first:end])
            brought += found
            if len(found) < end - first:
                break
        return brought

    def _reload_run(self, tier: str, names: Sequence[bytes]) -> list[int]:
        """Reload blocks of one tier in batches, as long as they come in time."""
        brought: list[int] = []
        begun, computed = perf_counter(), self.speeds.compute(len(names)) if self._measured else None
        while len(brought) < len(names):
            first = len(brought)
            count = self._num_worth_it(tier, len(names) - first)
            wanted = [(name, self._pool.allocate()) for name in names[first : first + count]]
            if not wanted:
                break
            within = None
            if tier == "files":
                self.store.prefetch(names[first : first + _READ_AHEAD])
                if computed is not None:
                    # Not later than by recomputing them, plus some slack: the first read takes its time.
                    spent, slack = perf_counter() - begun, _LATER * len(names)
                    within = (first + 1 + slack) * computed - spent, computed
            asked = perf_counter()
            num_found = self.store.bring(wanted, within)
            seconds = max(perf_counter() - asked, self.store.least_seconds(num_found))
            self._pool.release([block for _, block in wanted[num_found:]])
            for name, block in wanted[:num_found]:
                self._pool.fill(block, name)
                brought.append(block)
            self.load_seconds += seconds
            self.speeds.note(tier, max(num_found, 1), seconds)
            self.loaded_bytes += num_found * self.store.block_bytes
            if num_found < len(wanted):
                break
        if tier == "files" and len(brought) < len(names):
            self.store.stop_prefetch(names[len(brought) :])
        return brought

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Record the seconds of a step that computed prompts: the cost of blocks that are not reloaded."""
        self.speeds.note_step(num_tokens, seconds)

    def load(self) -> dict[str, Any]:
        """Return the traffic so far, by the field names of `Load`."""
        return {
            "kv_offload_load_bytes": self.loaded_bytes,
            "kv_offload_store_bytes": self.stored_bytes,
            "kv_offload_load_seconds": self.load_seconds,
            "kv_offload_store_seconds": self.store_seconds,
            "kv_offload_host_usage": self.store.host_usage,
        }

    def close(self) -> None:
        """Write to the files what only the host has, so that the next start finds it, and close."""
        self.store.flush()
        self.store.close()
        self._pool.on_evict = self._pool.on_drop = None

    def _keep(self, block: int, name: bytes) -> bool:
        begun = perf_counter()
        is_moved = self.store.put(block, name)
        if is_moved:
            self.stored_bytes += self.store.block_bytes
            self.store_seconds += perf_counter() - begun
        return is_moved

    def _num_worth_it(self, tier: str, num_blocks: int) -> int:
        """Return how many of this many blocks to reload before deciding again."""
        if not self._measured:
            return num_blocks
        if self.speeds.is_faster(tier, num_blocks):
            return min(num_blocks, _AT_ONCE[tier])
        self._num_refused += 1
        return 1 if self._num_refused % _TRY_AGAIN == 0 else 0


def make_tiers(limits: Limits, data: Tensor, pool: BlockPool) -> Tiers | None:
    """Make the tiers below a cache, if any were asked for."""
    if not limits.has_tiers:
        return None
    store = make_store(data, limits.tiers())
    # A host tier that is hardly larger than the cache should not fill up with blocks that the cache still holds.
    num_ahead = min(pool.num_blocks // 2, store.host.num_blocks // 4 or pool.num_blocks)
    return Tiers(store, pool, measured=limits.measured, num_ahead=num_ahead)
