"""The bytes of blocks in the tiers below one device's cache: pinned host memory, and files below it. No policy.

    cache  --put-->  host  --evicted-->  files
      ^                |                    |
      +-----bring------+--------------------+

Copies between a GPU and the host run concurrently with its steps (`block_copies.py`); threads write and read files
(`file_tier.py`). A block that goes to a file keeps its place on the host until it is written: a thread waits for its
copy, writes it, and gives the place back. Nothing else waits. If there is no place left, the block that has waited
longest to be written is dropped. Copies are begun in batches (`begin`), and only then handed to the threads.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from torch import Tensor

from shardwise.serving.block_copies import BlockCopies
from shardwise.serving.eviction import Arc
from shardwise.serving.file_tier import FileTier
from shardwise.serving.host_places import HostPlaces

#: Places for blocks on their way to files: at most this many, and at most this many bytes.
_MOST_LEAVING, _MOST_LEAVING_BYTES = 256, 512 * 2**20
_FLUSHED_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """How many bytes each tier may hold on one rank."""

    host_bytes: int = 0
    file_bytes: int = 0
    folder: Path | None = None


class HostTier:
    """Blocks in host memory, pinned where a GPU copies from it, evicted by ARC.

    It has extra places for the blocks on their way to files.
    """

    def __init__(self, num_bytes: int, block_bytes: int, *, pinned: bool = False, num_leaving: int = 4) -> None:
        self.num_blocks = num_bytes // block_bytes
        self.places = HostPlaces(self.num_blocks + num_leaving, block_bytes, pinned=pinned)
        self._place_of: dict[bytes, int] = {}
        self._names = Arc(self.num_blocks)

    def __len__(self) -> int:
        return len(self._place_of)

    def __contains__(self, name: bytes) -> bool:
        return name in self._place_of

    def names(self) -> list[bytes]:
        return list(self._names)

    def make_room(self) -> tuple[bytes, int] | None:
        """Make room for one more block. Returns an evicted name, if any, and its place, which the caller gives back."""
        if len(self._place_of) < self.num_blocks:
            return None
        name = self._names.evict()
        return name, self._place_of.pop(name)

    def put(self, name: bytes) -> int:
        """Take a place for a block, into which the caller copies the bytes."""
        place = self.places.take()
        assert place is not None, "who makes room sees to it that there is a place"
        self._place_of[name] = place
        self._names.add(name)
        return place

    def find(self, name: bytes) -> int | None:
        """Return the place of its bytes, which may still be on their way there."""
        place = self._place_of.get(name)
        if place is not None:
            self._names.touch(name)
        return place

    def renew(self, name: bytes) -> None:
        """Treat a block that the cache has evicted again like a new one in the eviction order."""
        self._names.renew(name)

    def look(self, name: bytes) -> int:
        """Return the place of a block without counting it as requested."""
        return self._place_of[name]


class TierStore:
    """Host and file tiers below the cache `data`, [blocks, bytes]. One thread calls all methods."""

    def __init__(
        self, data: Tensor, host: HostTier, files: FileTier | None = None, *, copies: BlockCopies | None = None
    ) -> None:
        self._data, self.host, self.files = data, host, files
        self._copies = copies or BlockCopies(data)
        self._block_seconds = self._copies.block_seconds(host.places if files is None else files.places)
        #: Places of blocks that go to files once their copies have begun, by name.
        self._to_write: dict[bytes, int] = {}

    @property
    def copies_beside(self) -> bool:
        """Whether blocks can be copied out while steps run."""
        return self._copies.are_beside

    @property
    def block_bytes(self) -> int:
        return int(self._data.shape[1])

    @property
    def host_usage(self) -> float:
        return len(self.host) / max(self.host.num_blocks, 1)

    def file_names(self) -> list[bytes]:
        return [] if self.files is None else self.files.names()

    def tiers_of(self, names: Sequence[bytes]) -> list[str]:
        """Return the tiers of the first of these names, up to the first that is in none."""
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
        """Keep the bytes of a block, unless a tier has them already. Return whether they were moved."""
        if name in self.host:
            self.host.renew(name)
            return False
        if not self.host.num_blocks:
            return self._put_in_a_file(block, name)
        leaving = self.host.make_room()
        if leaving is not None:
            self._let_go(*leaving)
        self._copies.out(block, self.host.places, self.host.put(name))
        return True

    def let_go(self, block: int) -> None:
        """Note that a block of the cache will be overwritten from now on."""
        self._copies.let_go(block)

    def bring(self, wanted: Sequence[tuple[bytes, int]], within: tuple[float, float] | None = None) -> int:
        """Copy blocks by name into these blocks of the cache, in order. Return how many, up to the first miss.

        With `within`, wait for files at most `within[0]` seconds for the first block, and `within[1]` for each further.
        """
        begun = perf_counter()
        for name, _ in wanted:
            self._read_ahead(name)
        lot: list[tuple[HostPlaces, int, int]] = []
        num_found = 0
        for name, block in wanted:
            place, places = self.host.find(name), self.host.places
            if place is None:
                if self.files is None:
                    break
                if lot and not self.files.is_read(name):  # Blocks that are here do not wait for a disk.
                    lot = self._bring(lot)
                until = None if within is None else begun + within[0] + num_found * within[1]
                place, places = self.files.find(name, until), self.files.places
                if place is None:
                    break
            lot.append((places, place, block))
            num_found += 1
        self._bring(lot)
        return num_found

    def _bring(self, lot: list[tuple[HostPlaces, int, int]]) -> list[tuple[HostPlaces, int, int]]:
        """Begin to copy these, and give back the places of file reads. Returns an empty list for the next ones."""
        if lot:
            self._copies.bring(lot)
        for places, place, _ in lot:
            if places is not self.host.places:
                places.give_back(place)
        return []

    def begin(self) -> None:
        """Begin the copies of all blocks that were put, and hand those that go to files to the threads."""
        self._copies.begin()
        self._begin_to_write()

    def fence(self) -> None:
        """Order the next step behind the copies that affect it. Call `begin` after launching the step: handing
        hundreds of files to threads takes longer than a step should wait."""
        self._copies.fence()

    def least_seconds(self, num_blocks: int) -> float:
        """Return the link's time for this many blocks: on a GPU `bring` only launches the copies."""
        return num_blocks * self._block_seconds

    def prefetch(self, names: Sequence[bytes]) -> None:
        """Read ahead blocks in files that will be requested."""
        for name in names:
            self._read_ahead(name)

    def stop_prefetch(self, names: Sequence[bytes]) -> None:
        """Stop reading ahead blocks that are not needed for now."""
        if self.files is not None:
            self.files.stop_reading(names)

    def flush(self) -> None:
        """Write to the files what only the host has, so that the next start finds it."""
        if self.files is not None:
            self.begin()
            places = self.host.places
            for number, name in enumerate(self.host.names()):
                place = self.host.look(name)
                self.files.put(name, places.views[place], before=partial(places.wait, place))
                if number % _FLUSHED_AT_ONCE == 0:
                    self.files.settle()

    def settle(self) -> None:
        """Wait for all copies: blocks that were not let go are about to be overwritten."""
        self._copies.settle()
        self._begin_to_write()

    def close(self) -> None:
        self.settle()
        if self.files is not None:
            self.files.close()

    def _read_ahead(self, name: bytes) -> None:
        if self.files is not None and name not in self.host:
            self.files.prefetch(name)

    def _put_in_a_file(self, block: int, name: bytes) -> bool:
        if self.files is None or name in self._to_write or not self.files.wants(name):
            return False
        places, place = self.host.places, self._take_place()
        if place is None:
            self.files.num_skipped += 1
            return False
        self._copies.out(block, places, place)
        self._to_write[name] = place
        return True

    def _take_place(self) -> int | None:
        """Return a place for a block on its way to a file: a free one, or that of the block that has waited longest."""
        place = self.host.places.take()
        if place is not None or self.files is None:
            return place
        if self.files.give_up_oldest():
            return self.host.places.take()
        if not self._to_write:
            return None
        self.files.num_skipped += 1
        return self._to_write.pop(next(iter(self._to_write)))  # Copies to one place run in order.

    def _let_go(self, name: bytes, place: int) -> None:
        """Evict a block from the host: to a file, if there is another free place for the new block meanwhile."""
        places = self.host.places
        if self.files is not None and places.num_free and name not in self._to_write and self.files.wants(name):
            self._to_write[name] = place
        else:
            places.give_back(place)

    def _begin_to_write(self) -> None:
        """Hand blocks whose copies have begun to the writers; a thread waits for the event of each place."""
        going, self._to_write = self._to_write, {}
        for name, place in going.items():
            if not self._write(name, place):  # The disk has fallen behind meanwhile, or is off.
                self.host.places.give_back(place)

    def _write(self, name: bytes, place: int) -> bool:
        assert self.files is not None, "whoever writes has looked"
        places = self.host.places
        return self.files.put(
            name, places.views[place], before=partial(places.wait, place), after=partial(places.give_back, place)
        )


def make_store(data: Tensor, given: TierBytes) -> TierStore:
    size = int(data.shape[1])
    if given.folder is None:
        return TierStore(data, HostTier(given.host_bytes, size, pinned=data.is_cuda, num_leaving=0))
    num_leaving = min(_MOST_LEAVING, max(_MOST_LEAVING_BYTES // size, 2))
    host = HostTier(given.host_bytes, size, pinned=data.is_cuda, num_leaving=num_leaving)
    return TierStore(data, host, FileTier(given.folder, given.file_bytes, size, pinned=data.is_cuda))
