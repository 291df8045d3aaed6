"""What lies beneath the cache: blocks that had to leave it, in host memory, and beneath that in files.

    KV cache  --evicted-->  host memory  --evicted-->  files
        ^                        |                       |
        +------- reloaded -------+-----------------------+      if that is faster than to compute them again

A block keeps its name on its way down, so a beginning is found wherever it is; no tier holds more bytes than it may.
What was reloaded stays beneath too: if it is evicted again, nothing has to be written. All of it belongs to the thread
that steps the engine, so a block is never read while it is written.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shardwise.serving.blocks import BlockPool
from shardwise.serving.file_tier import FileTier

#: Of so many refusals one is tried all the same: what was slow once may be fast by now.
_TRY_AGAIN = 64


@dataclass(slots=True, kw_only=True)
class Speeds:
    """Seconds of one block, by what is done to it: as measured, late measurements counting most."""

    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, what: str, num_blocks: float, seconds: float) -> None:
        found = seconds / num_blocks
        before = self.seconds.get(what)
        self.seconds[what] = found if before is None else 0.8 * before + 0.2 * found


class HostTier:
    """Blocks in host memory, pinned where a GPU copies from it; who was longest not asked for goes first."""

    def __init__(self, num_bytes: int, block_bytes: int, *, pinned: bool = False) -> None:
        self.num_blocks = num_bytes // block_bytes
        self._data = torch.empty(self.num_blocks, block_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._free = list(range(self.num_blocks))
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    def items(self) -> Iterator[tuple[bytes, Tensor]]:
        """All of them, oldest first."""
        return ((name, self._data[place]) for name, place in self._places.items())

    def oldest(self) -> tuple[bytes, Tensor] | None:
        """Who goes next, if somebody has to."""
        if self._free or not self._places:
            return None
        name = next(iter(self._places))
        return name, self._data[self._places[name]]

    def put(self, name: bytes, block: Tensor) -> None:
        if not self.num_blocks:
            return
        if not self._free:
            self._free.append(self._places.popitem(last=False)[1])
        place = self._places[name] = self._free.pop()
        self._data[place].copy_(block)

    def find(self, name: bytes) -> Tensor | None:
        """Its bytes, until the next `put`."""
        if name not in self._places:
            return None
        self._places.move_to_end(name)
        return self._data[self._places[name]]


class Tiers:
    """Host and files beneath one cache. `measured=False` reloads whatever is there, for tests."""

    def __init__(
        self, data: Tensor, pool: BlockPool, host: HostTier, files: FileTier | None = None, *, measured: bool = True
    ) -> None:
        self._data, self._pool = data, pool
        self.host, self.files, self.speeds = host, files, Speeds()
        self._measured, self._num_refused = measured, 0
        self.loaded_bytes = self.stored_bytes = 0
        self.load_seconds = self.store_seconds = 0.0
        pool.on_evict = self.evict

    def evict(self, block: int, name: bytes) -> None:
        """A block leaves the cache: it goes to the host, and who has to make room there to the files."""
        if name in self.host:
            self.host.find(name)  # It was asked for: it stays longer.
            return
        begun = perf_counter()
        leaving = self.host.oldest()
        if leaving is not None and self.files is not None:
            self.files.put(*leaving)
        if self.host.num_blocks:
            self.host.put(name, self._data[block])
        elif self.files is not None:
            self.files.put(name, self._data[block].cpu())
        self.stored_bytes += self._data.shape[1]
        self.store_seconds += perf_counter() - begun

    def reload(self, names: list[bytes]) -> list[int]:
        """Bring the first of these that are beneath, one after the other, as long as that is worth it."""
        brought: list[int] = []
        for name in names:
            tier = self._tier_of(name)
            if tier is None or not self._is_worth_it(tier):
                break
            # First a block, whose going may send another down; then the bytes, if they are still there.
            block = self._pool.allocate()
            begun = perf_counter()
            found = self.host.find(name) if tier == "host" else self._from_files(name)
            if found is None:
                self._pool.release([block])
                break
            self._data[block].copy_(found)
            seconds = perf_counter() - begun
            self.speeds.note(tier, 1, seconds)
            self.loaded_bytes += self._data.shape[1]
            self.load_seconds += seconds
            self._pool.fill(block, name)
            brought.append(block)
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
            "kv_offload_host_usage": len(self.host) / max(self.host.num_blocks, 1),
        }

    def flush(self) -> None:
        """Write to the files what only the host has, so that the next start finds it."""
        if self.files is not None:
            for name, block in self.host.items():
                self.files.put(name, block)

    def _tier_of(self, name: bytes) -> str | None:
        if name in self.host:
            return "host"
        return "files" if self.files is not None and name in self.files else None

    def _from_files(self, name: bytes) -> Tensor | None:
        assert self.files is not None, "there is a tier of files: the name was found in it"
        return self.files.find(name)

    def _is_worth_it(self, tier: str) -> bool:
        load, compute = self.speeds.seconds.get(tier), self.speeds.seconds.get("compute")
        if not self._measured or load is None or compute is None or load < compute:
            return True
        self._num_refused += 1
        return self._num_refused % _TRY_AGAIN == 0
