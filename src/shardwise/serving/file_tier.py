"""KV blocks in files of one folder, a file a block, found again after a restart.

    NAME.kv     8 bytes of checksum, 8 of the name, then the block

Files are written, removed and read by threads of their own, beside the engine's steps, and so are checksums made. What
is read goes to pinned memory where there is a GPU. A block can be found once its file is whole, under its name. One
that cannot be read, has not its length or does not fit its checksum is a miss, and goes. A disk that is full or cannot
be written to turns the tier off, with one line: nothing else fails.

One thread calls all methods; what the others have done is taken over at each call.
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

_SUFFIX = ".kv"
_HEAD_BYTES = 16
#: Blocks that may wait to be written. What comes faster than the disk takes it is not kept, and of all that wait the
#: first go: whoever leaves the cache later was asked for later, or is nearer to the beginning that it is part of, and
#: what lies behind a block that is missing is found by nobody.
_MOST_WRITES = 256
#: What is read ahead has so many places, or those of so many bytes.
_MOST_READS, _MOST_READ_BYTES = 64, 256 * 2**20
_WRITERS, _READERS = 4, 8


class FileTier:
    """At most `num_bytes` of files; who goes is chosen by ARC. `off` says why it is, if it is."""

    def __init__(self, folder: Path, num_bytes: int, block_bytes: int, *, pinned: bool = False) -> None:
        self.folder = folder
        self.num_blocks = num_bytes // (block_bytes + _HEAD_BYTES)
        #: Where bytes are that were read.
        num_places = min(_MOST_READS, max(_MOST_READ_BYTES // block_bytes, 2))
        self.places = HostPlaces(num_places, block_bytes, pinned=pinned)
        self.off: str | None = None
        #: Blocks that were not written because the disk did not keep up.
        self.num_skipped = 0
        self._names = Arc(self.num_blocks)
        #: Writes that wait or are under way, the oldest first, and what is called behind them.
        self._writing: dict[bytes, tuple[Future[None], Callable[[], None] | None]] = {}
        #: Reads that were begun, the oldest first, and where to.
        self._reading: dict[bytes, tuple[Future[bool], int]] = {}
        #: What was written, and not taken over yet; removals under way, the oldest first.
        self._written: deque[bytes] = deque()
        self._going: deque[Future[None]] = deque()
        self._errors: deque[OSError] = deque()
        self._writers = [ThreadPoolExecutor(1) for _ in range(_WRITERS)]
        self._reader = ThreadPoolExecutor(_READERS)
        # The same on every machine, and odd: no word can change without changing the sum.
        self._factors = np.random.PCG64(0).random_raw(block_bytes // 8 + 1) | np.uint64(1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = [(each.stat().st_mtime_ns, each.stem) for each in folder.glob(f"*{_SUFFIX}")]
        except OSError as error:
            self._turn_off(error)
            return
        for _, stem in sorted(known):
            with suppress(ValueError):  # Somebody else's file.
                self._names.add(bytes.fromhex(stem))
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        self._take_over()
        return name in self._names

    @property
    def known(self) -> Container[bytes]:
        """Names whose files are whole, as far as that was taken over: to be looked at from any thread."""
        return self._names

    def names(self) -> list[bytes]:
        return list(self._names)

    def wants(self, name: bytes) -> bool:
        """Whether a block that leaves would be written: it is not there yet, and the disk keeps up."""
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
        """Do not write whoever has waited longest, if anybody waits."""
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
        """Write a block, if it is wanted. A thread calls `before`, until which its bytes may be on their way, and
        `after`, from when on they may become others."""
        if not self.wants(name):
            return False
        self._make_room(1)
        writing = self._writer(name).submit(self._write, name, block, before, after, list(self._going))
        self._writing[name] = writing, after
        return True

    def prefetch(self, name: bytes) -> None:
        """Begin to read a block that somebody will ask for, if there is a place for it."""
        if name in self and name not in self._reading:
            place = self.places.take()
            if place is not None:
                self._begin_to_read(name, place)

    def is_read(self, name: bytes) -> bool:
        """Whether its bytes, or that they are none, can be had without waiting."""
        return name in self._reading and self._reading[name][0].done()

    def find(self, name: bytes, until: float | None = None) -> int | None:
        """The one of `places` where its bytes are, if they are whole, and there until this time (`perf_counter`).
        Whoever has taken them gives the place back."""
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
        """Nobody will ask for these now. What is being read already stays to be found."""
        for name in names:
            reading = self._reading.get(name)
            if reading is not None and reading[0].cancel():
                del self._reading[name]
                self.places.give_back(reading[1])

    def settle(self) -> None:
        """Wait for all that is being written or removed."""
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
        """A free one, or that of whoever was read ahead longest ago, and not asked for."""
        place = self.places.take()
        if place is None:
            name = next(iter(self._reading))
            reading, place = self._reading.pop(name)
            if not reading.cancel():
                reading.result()
        return place

    def _take_over(self) -> None:
        """What the writers have done since."""
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
        """Of one name all is done by one thread, in order."""
        return self._writers[name[-1] % len(self._writers)]

    # In the threads.

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
            for each in going:  # Whose room it takes. They were begun before this, so nobody waits for nobody.
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
        """Whether the bytes of a block lie in a place now."""
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
        """A sum that every damaged word changes, and whose block it is.

        Words times odd numbers that were drawn once: it runs at the speed of memory, and not under Python's lock.
        """
        num_words = len(content) // 8
        total = int(np.dot(content[: 8 * num_words].view(np.uint64), self._factors[:num_words]))
        total += int.from_bytes(content[8 * num_words :].tobytes(), "little") * int(self._factors[num_words])
        return (total % 2**64).to_bytes(8, "little") + name[:8].ljust(8, b"\0")

    def _unlink(self, name: bytes) -> None:
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: bytes) -> Path:
        return self.folder / f"{name.hex()}{_SUFFIX}"

    def _turn_off(self, error: OSError) -> None:
        self.off = f"the file tier in {self.folder} is off: {error.strerror or error}"
        warnings.warn(self.off, stacklevel=3)
