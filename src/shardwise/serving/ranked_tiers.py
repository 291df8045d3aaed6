"""Tiers below the caches of many ranks: each rank keeps its own part of every block, in its own memory and files.

All ranks get the same operations in the same order, so the same blocks are in the same tiers everywhere. Evictions are
sent with the next step. A reload asks all ranks, and counts up to the first block that any rank does not have.
"""

from collections.abc import Sequence

from shardwise.serving.blocks import BlockPool
from shardwise.serving.ranked import RankedRunner
from shardwise.serving.tier_store import TierBytes
from shardwise.serving.tiers import Tiers


def make_ranked_tiers(
    runner: RankedRunner, sizes: Sequence[int], given: Sequence[TierBytes], pool: BlockPool, *, measured: bool
) -> Tiers:
    """Make the tiers of ranks whose parts of a block have these sizes, with these limits."""
    num_host_blocks = min(each.host_bytes // size for each, size in zip(given, sizes, strict=True))
    return Tiers(RankedTiers(runner, sum(sizes), num_host_blocks), pool, measured=measured)


class RankedTiers:
    """The store of `Tiers` over a runner of ranks. `block_bytes` counts a block on all of them."""

    def __init__(self, runner: RankedRunner, block_bytes: int, num_host_blocks: int) -> None:
        self._runner, self.block_bytes, self._num_host_blocks = runner, block_bytes, num_host_blocks
        #: Names that may be in a tier: those in files of earlier runs, and all that were evicted. Others are misses.
        self._known = set[bytes]().union(*runner.ask_tiers("file_names"))
        self._num_put = 0
        self._block_seconds: float = max(runner.ask_tiers("least_seconds", 1))

    @property
    def copies_beside(self) -> bool:
        """False: evictions are sent with the next step, so writing ahead gains nothing."""
        return False

    @property
    def host_usage(self) -> float:
        return min(self._num_put / max(self._num_host_blocks, 1), 1.0)

    def count_known(self, names: Sequence[bytes]) -> int:
        return next((place for place, name in enumerate(names) if name not in self._known), len(names))

    def tiers_of(self, names: Sequence[bytes]) -> list[str]:
        num_known = self.count_known(names)
        if not num_known:
            return []
        found: list[list[str]] = self._runner.ask_tiers("tiers_of", list(names[:num_known]))
        shortest = min(found, key=len)
        self._known.difference_update(names[len(shortest) : num_known][:1])  # It has left the lowest tier.
        # The slower tier counts if ranks differ, as they do after one rank's disk has failed.
        return ["host" if all(each[place] == "host" for each in found) else "files" for place in range(len(shortest))]

    def put(self, block: int, name: bytes) -> bool:
        self._runner.evict(block, name)
        is_new = name not in self._known
        self._known.add(name)
        self._num_put += is_new
        return is_new

    def let_go(self, block: int) -> None:
        """Nothing to do: ranks let a block go when they get its eviction."""

    def bring(self, wanted: Sequence[tuple[bytes, int]], within: tuple[float, float] | None = None) -> int:
        found: list[int] = self._runner.ask_tiers("bring", list(wanted), within)
        return min(found)

    def begin(self) -> None:
        """Nothing to do: ranks do this before each step."""

    def fence(self) -> None:
        """Nothing to do: ranks do this before each step."""

    def settle(self) -> None:
        """Nothing to do: only blocks that ranks have let go are being copied."""

    def least_seconds(self, num_blocks: int) -> float:
        return num_blocks * self._block_seconds

    def prefetch(self, names: Sequence[bytes]) -> None:
        known = [name for name in names if name in self._known]
        if known:
            self._runner.ask_tiers("prefetch", known)

    def stop_prefetch(self, names: Sequence[bytes]) -> None:
        self._runner.ask_tiers("stop_prefetch", list(names))

    def flush(self) -> None:
        if self._runner.ranks.process_ids:  # After a failure there is nothing to flush.
            self._runner.ask_tiers("flush")

    def close(self) -> None:
        if self._runner.ranks.process_ids:
            self._runner.ask_tiers("close")
