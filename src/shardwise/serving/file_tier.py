"""KV blocks in the files of one folder, one file per block, which survive a restart.

    NAME.kv     8 bytes of checksum, 8 of the name, then the block

Dedicated threads write, remove and read files and compute checksums, concurrently with the engine's steps. Blocks are
read into pinned memory where there is a GPU. A block can be found once its file is complete and has its final name. A
file that cannot be read, has the wrong length or fails its checksum is a miss, and is removed. A disk that is full or
not writable turns the tier off with one warning; nothing else fails.

One thread calls all methods; each call takes over the results of the other threads.
"""

import os
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardwise.serving.eviction import Arc
from shardwise.serving.host_places import HostPlaces
from shardwise.serving.kv_folder import SUFFIX, is_block, is_left_over

_HEAD_BYTES = 16
#: The most blocks that may wait to be written. If blocks come faster than the disk writes, the oldest waiting ones are
#: dropped: blocks that leave the cache later were requested later, or are nearer to the beginning of their prefix, and
#: a block behind a missing one cannot be found.
_MOST_WRITES = 256
#: Places for blocks that are read ahead: at most this many, and at most this many bytes.
_MOST_READS, _MOST_READ_BYTES = 64, 256 * 2**20
_WRITERS, _READERS = 4, 8


class FileTier:
    """At most `num_bytes` of files, evicted by ARC. If the tier is off, `off` says why."""

    def __init__(self, folder: Path, num_bytes: int, block_bytes: int, *, pinned: bool = False) -> None:
        self.folder = folder
        self.num_blocks = num_bytes // (block_bytes + _HEAD_BYTES)
        #: Host memory for blocks that were read.
        num_places = min(_MOST_READS, max(_MOST_READ_BYTES // block_bytes, 2))
        self.places = HostPlaces(num_places, block_bytes, pinned=pinned)
        self.off: str | None = None
        #: Blocks that were not written because the disk was too slow.
        self.num_skipped = 0
        self._names = Arc(self.num_blocks)
        #: Writes that wait or are in progress, oldest first, each with its `after` callback.
        self._writing: dict[bytes, tuple[Future[None], Callable[[], None] | None]] = {}
        #: Reads that were begun, oldest first, each with its place.
        self._reading: dict[bytes, tuple[Future[bool], int]] = {}
        #: Names that were written and are not taken over yet; and removals in progress, oldest first.
        self._written: deque[bytes] = deque()
        self._going: deque[Future[None]] = deque()
        self._errors: deque[OSError] = deque()
        self._writers = [ThreadPoolExecutor(1) for _ in range(_WRITERS)]
        self._reader = ThreadPoolExecutor(_READERS)
        # The same on every machine. Odd, so that a change of any single word changes the sum.
        self._factors = np.random.PCG64(0).random_raw(block_bytes // 8 + 1) | np.uint64(1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            here = list(folder.iterdir())
            known = [(each.stat().st_mtime_ns, each.stem) for each in here if is_block(each)]
            for each in here:
                if is_left_over(each):
                    each.unlink(missing_ok=True)
        except OSError as error:
            self._turn_off(error)
            return
        for _, stem in sorted(known):
            self._names.add(bytes.fromhex(stem))
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        self._take_over()
        return name in self._names

    @property
    def known(self) -> Container[bytes]:
        """Names whose files are complete, as of the last take-over. Any thread may read this."""
        return self._names

    def names(self) -> list[bytes]:
        return list(self._names)

    def wants(self, name: bytes) -> bool:
        """Whether an evicted block should be written: it is not in a file yet, and the disk keeps up."""
        self._take_over()
        if self.off is not None or not self.num_blocks or name in self._writing:
            return False
        if name in self._names:
            self._names.renew(name)
            return False
        if len(self._writing) >= min(_MOST_WRITES, self.num_blocks) and not self.give_up_oldest():
            self.num_skipped += 1
            return False
        return True

    def give_up_oldest(self) -> bool:
        """Cancel the write that has waited longest, if one has not begun. Returns whether one was cancelled."""
        for name, (writing, after) in self._writing.items():
            if writing.cancel():
                del self._writing[name]
                self.num_skipped += 1
                if after is not None:
                    after()
                return True
        return False

    def put(
        self, name: bytes, block: Tensor, *, before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> bool:  # fmt: skip
        """Write a block if it is wanted. The writer thread calls `before`, which waits until the bytes have arrived,
        and `after`, from which on the memory may be reused."""
        if not self.wants(name):
            return False
        self._make_room(1)
        writing = self._writer(name).submit(self._write, name, block, before, after, list(self._going))
        self._writing[name] = writing, after
        return True

    def prefetch(self, name: bytes) -> None:
        """Begin to read a block that will be requested, if there is a place for it."""
        if name in self and name not in self._reading:
            place = self.places.take()
            if place is not None:
                self._begin_to_read(name, place)

    def is_read(self, name: bytes) -> bool:
        """Whether its read is over, successful or not, so that `find` does not wait."""
        return name in self._reading and self._reading[name][0].done()

    def find(self, name: bytes, until: float | None = None) -> int | None:
        """Return the one of `places` that holds its bytes; None if they are damaged, or not read by the time `until`
        (`perf_counter`). The caller gives the place back."""
        if name not in self:
            return None
        if name not in self._reading:
            self._begin_to_read(name, self._take_place())
        reading, place = self._reading[name]
        try:
            is_whole = reading.result(None if until is None else max(until - perf_counter(), 0.0))
        except TimeoutError:
            return None
        del self._reading[name]
        if not is_whole:
            self.places.give_back(place)
            self._remove(name)
            return None
        self._names.touch(name)
        return place

    def stop_reading(self, names: Iterable[bytes]) -> None:
        """Cancel reads that are not needed now. Reads in progress continue and can still be found."""
        for name in names:
            reading = self._reading.get(name)
            if reading is not None and reading[0].cancel():
                del self._reading[name]
                self.places.give_back(reading[1])

    def settle(self) -> None:
        """Wait for all writes and removals."""
        for each in (*(writing for writing, _ in self._writing.values()), *self._going):
            each.result()
        self._take_over()

    def close(self) -> None:
        self.settle()
        for each in (*self._writers, self._reader):
            each.shutdown()

    def _begin_to_read(self, name: bytes, place: int) -> None:
        self._reading[name] = self._reader.submit(self._read, name, place), place

    def _take_place(self) -> int:
        """Return a free place, or that of the oldest read-ahead that was not requested."""
        place = self.places.take()
        if place is None:
            name = next(iter(self._reading))
            reading, place = self._reading.pop(name)
            if not reading.cancel():
                reading.result()
        return place

    def _take_over(self) -> None:
        """Take over what the writers have finished."""
        while self._written:
            name = self._written.popleft()
            del self._writing[name]
            if not self._errors:
                self._names.add(name)
        while self._going and self._going[0].done():
            self._going.popleft()
        if self._errors and self.off is None:
            self._turn_off(self._errors[0])

    def _make_room(self, num_coming: int) -> None:
        while len(self._names) and len(self._names) + len(self._writing) + num_coming > self.num_blocks:
            self._forget(self._names.evict())

    def _remove(self, name: bytes) -> None:
        self._names.remove(name)
        self._forget(name)

    def _forget(self, name: bytes) -> None:
        if name in self._reading:
            reading, place = self._reading.pop(name)
            if not reading.cancel():
                reading.result()
            self.places.give_back(place)
        self._going.append(self._writer(name).submit(self._unlink, name))

    def _writer(self, name: bytes) -> ThreadPoolExecutor:
        """Return the thread for a name: operations on one name run in order."""
        return self._writers[name[-1] % len(self._writers)]

    # The methods below run in the threads.

    def _write(
        self, name: bytes, block: Tensor, before: Callable[[], None] | None, after: Callable[[], None] | None,
        going: list[Future[None]],
    ) -> None:  # fmt: skip
        path = self._path(name)
        beside = path.with_suffix(f".{os.getpid()}")
        try:
            if before is not None:
                before()
            content = block.numpy()
            head = self._head(name, content)
            for each in going:  # Removals that make room for this write. They were submitted earlier: no deadlock.
                each.result()
            with beside.open("wb") as file:
                file.write(head)
                file.write(content.data)
            beside.replace(path)
        except OSError as error:
            self._errors.append(error)
            with suppress(OSError):
                beside.unlink(missing_ok=True)
        finally:
            if after is not None:
                after()
            self._written.append(name)

    def _read(self, name: bytes, place: int) -> bool:
        """Read a block into a place. Returns whether its bytes are complete and undamaged."""
        self.places.wait(place)
        content = self.places.views[place].numpy()
        try:
            with self._path(name).open("rb", buffering=0) as file:
                head, begin = file.read(_HEAD_BYTES), 0
                while count := file.readinto(content.data[begin:]):
                    begin += count
                is_over = not file.read(1)
        except OSError:
            return False
        return is_over and begin == len(content) and head == self._head(name, content)

    def _head(self, name: bytes, content: NDArray[np.uint8]) -> bytes:
        """Return the header of a file: a checksum, which every damaged word changes, and part of the name.

        The checksum is the dot product of the words with fixed odd random numbers: it runs at the speed of memory, and
        without Python's global lock.
        """
        num_words = len(content) // 8
        total = int(np.dot(content[: 8 * num_words].view(np.uint64), self._factors[:num_words]))
        total += int.from_bytes(content[8 * num_words :].tobytes(), "little") * int(self._factors[num_words])
        return (total % 2**64).to_bytes(8, "little") + name[:8].ljust(8, b"\0")

    def _unlink(self, name: bytes) -> None:
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: bytes) -> Path:
        return self.folder / f"{name.hex()}{SUFFIX}"

    def _turn_off(self, error: OSError) -> None:
        self.off = f"the file tier in {self.folder} is off: {error.strerror or error}"
        warnings.warn(self.off, stacklevel=3)
