"""The bytes of blocks beneath one device's cache: pinned host memory, and files beneath that. It decides nothing.

    cache  --put-->  host  --who has to leave-->  files
      ^                |                             |
      +-----bring------+-----------------------------+

On a GPU copies to the host go on a stream of their own. The host does not wait for them; the next step on the device
does, as it may write into the block that is being copied.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.serving.eviction import Arc
from shardwise.serving.file_tier import FileTier


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """How much each tier may hold, on one rank."""

    host_bytes: int = 0
    file_bytes: int = 0
    folder: Path | None = None


class HostTier:
    """Blocks in host memory, pinned where a GPU copies from it; who leaves is chosen by ARC."""

    def __init__(self, num_bytes: int, block_bytes: int, *, pinned: bool = False) -> None:
        self.num_blocks = num_bytes // block_bytes
        self._data = torch.empty(self.num_blocks, block_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._free = list(range(self.num_blocks))
        self._places: dict[bytes, int] = {}
        self._names = Arc(self.num_blocks)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    def names(self) -> list[bytes]:
        return list(self._names)

    def make_room(self) -> tuple[bytes, Tensor] | None:
        """Room for one more; whoever had to leave for it, whose bytes are there until the next `put`."""
        if self._free or not self.num_blocks:
            return None
        name = self._names.evict()
        self._free.append(self._places.pop(name))
        return name, self._data[self._free[-1]]

    def put(self, name: bytes) -> Tensor:
        """A place for a block, whose bytes the caller copies there."""
        place = self._places[name] = self._free.pop()
        self._names.add(name)
        return self._data[place]

    def find(self, name: bytes) -> Tensor | None:
        """Its bytes, until the next `put`."""
        if name not in self._places:
            return None
        self._names.touch(name)
        return self._data[self._places[name]]

    def look(self, name: bytes) -> Tensor:
        """Its bytes, without counting as asked for."""
        return self._data[self._places[name]]

    def time_copies(self, data: Tensor) -> float:
        """Seconds of one block on its way to a GPU's cache, which nobody uses yet."""
        count = min(32, self.num_blocks, len(data))
        begun, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(2):  # The first is slower.
            begun.record()
            for block in range(count):
                data[block].copy_(self._data[block], non_blocking=True)
            over.record()
        over.synchronize()
        return float(begun.elapsed_time(over)) / 1e3 / max(count, 1)


class TierStore:
    """Host and files beneath the cache `data`, [blocks, bytes]. One thread calls all of it."""

    def __init__(self, data: Tensor, host: HostTier, files: FileTier | None = None) -> None:
        self._data, self.host, self.files = data, host, files
        self._stream: torch.cuda.Stream | None = None
        self._block_seconds = 0.0
        if data.is_cuda:
            self._stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
            self._block_seconds = host.time_copies(data)

    @property
    def block_bytes(self) -> int:
        return int(self._data.shape[1])

    @property
    def host_usage(self) -> float:
        return len(self.host) / max(self.host.num_blocks, 1)

    def file_names(self) -> list[bytes]:
        return [] if self.files is None else self.files.names()

    def tiers_of(self, names: Sequence[bytes]) -> list[str]:
        """Where the first of these lie, up to the first that lies nowhere."""
        found = []
        for name in names:
            tier = "host" if name in self.host else "files" if self.files is not None and name in self.files else None
            if tier is None:
                break
            found.append(tier)
        return found

    def count_known(self, names: Sequence[bytes]) -> int:
        files: Container[bytes] = () if self.files is None else self.files.known
        places = (place for place, name in enumerate(names) if name not in self.host and name not in files)
        return next(places, len(names))

    def put(self, block: int, name: bytes) -> bool:
        """A block leaves the cache. Return whether bytes were moved: what lies beneath already has not to be."""
        if name in self.host:
            self.host.find(name)  # It was asked for: it stays longer.
            return False
        if not self.host.num_blocks:
            if self.files is not None and name not in self.files:
                self.files.put(name, self._data[block].cpu())
            return self.files is not None
        leaving = self.host.make_room()
        if leaving is not None and self.files is not None:
            self._wait_for_copies()
            self.files.put(*leaving)
        place = self.host.put(name)
        if self._stream is None:
            place.copy_(self._data[block])
            return True
        computing = torch.cuda.current_stream(self._data.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            place.copy_(self._data[block], non_blocking=True)
        computing.wait_stream(self._stream)
        return True

    def bring(self, wanted: Sequence[tuple[bytes, int]]) -> int:
        """Copy blocks by name into these blocks of the cache, in order. Return how many, up to the first miss."""
        for number, (name, block) in enumerate(wanted):
            found = self.host.find(name)
            if found is None and self.files is not None:
                found = self.files.find(name)
            if found is None:
                return number
            # From pinned memory, behind whatever was copied there, and before the step that reads it.
            self._data[block].copy_(found, non_blocking=True)
        return len(wanted)

    def least_seconds(self, num_blocks: int) -> float:
        """What the link takes for as many: on a GPU copies are begun, and nobody waits for them."""
        return num_blocks * self._block_seconds

    def prefetch(self, names: Sequence[bytes]) -> None:
        """Somebody in the queue will ask for these: what is in files is read ahead."""
        if self.files is not None:
            for name in names:
                if name not in self.host:
                    self.files.prefetch(name)

    def flush(self) -> None:
        """Write to the files what only the host has, so that the next start finds it."""
        if self.files is not None:
            self._wait_for_copies()
            for name in self.host.names():
                self.files.put(name, self.host.look(name))
                self.files.settle()

    def close(self) -> None:
        if self.files is not None:
            self.files.close()

    def _wait_for_copies(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def make_store(data: Tensor, given: TierBytes) -> TierStore:
    size = int(data.shape[1])
    host = HostTier(given.host_bytes, size, pinned=data.is_cuda)
    return TierStore(data, host, None if given.folder is None else FileTier(given.folder, given.file_bytes, size))
