"""KV blocks in files of one folder, a file a block, found again after a restart.

    NAME.kv     16 bytes of checksum, then the block

Files are written, removed and read ahead by threads of their own, beside the engine's steps. A block can be found once
its file is whole, under its name. One that cannot be read, is too short or does not fit its checksum is a miss, and
goes. A disk that is full or cannot be written to turns the tier off, with one line: nothing else fails.

One thread calls all methods; what the others have done is taken over at each call.
"""

import os
import warnings
from collections import deque
from collections.abc import Container
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from shardwise.serving.eviction import Arc

_SUFFIX = ".kv"
_SUM_BYTES = 16
#: Blocks that may wait to be written: what comes faster than the disk takes it is not kept. And that are read ahead.
_MOST_WRITES, _MOST_READS = 256, 256


class FileTier:
    """At most `num_bytes` of files; who goes is chosen by ARC. `off` says why it is, if it is."""

    def __init__(self, folder: Path, num_bytes: int, block_bytes: int) -> None:
        self.folder, self._block_bytes = folder, block_bytes
        self.num_blocks = num_bytes // (block_bytes + _SUM_BYTES)
        self.off: str | None = None
        #: Blocks that were not written because the disk did not keep up.
        self.num_skipped = 0
        self._names = Arc(self.num_blocks)
        self._writing: dict[bytes, Future[None]] = {}
        self._reading: dict[bytes, Future[Tensor | None]] = {}
        self._errors: deque[OSError] = deque()
        self._writer, self._reader = ThreadPoolExecutor(1), ThreadPoolExecutor(2)
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

    def put(self, name: bytes, block: Tensor) -> None:
        """Write a block, unless it is there already. Its bytes are its own from here on."""
        self._take_over()
        if self.off is not None or not self.num_blocks or name in self._writing:
            return
        if name in self._names:
            self._names.touch(name)
            return
        if len(self._writing) >= min(_MOST_WRITES, self.num_blocks):
            self.num_skipped += 1
            return
        self._make_room(1)
        self._writing[name] = self._writer.submit(self._write, name, block.numpy().tobytes())

    def prefetch(self, name: bytes) -> None:
        """Begin to read a block that somebody will ask for."""
        if name in self and name not in self._reading and len(self._reading) < _MOST_READS:
            self._reading[name] = self._reader.submit(self._read, name)

    def find(self, name: bytes) -> Tensor | None:
        """Its bytes if they are whole."""
        if name not in self:
            return None
        reading = self._reading.pop(name, None)
        block = self._read(name) if reading is None else reading.result()
        if block is None:
            self._remove(name)
            return None
        self._names.touch(name)
        return block

    def settle(self) -> None:
        """Wait for all that is being written."""
        for each in list(self._writing.values()):
            each.result()
        self._writer.submit(lambda: None).result()  # Removals too.
        self._take_over()

    def close(self) -> None:
        self.settle()
        self._writer.shutdown()
        self._reader.shutdown()

    def _take_over(self) -> None:
        """What the writer has done since."""
        for name, each in list(self._writing.items()):
            if each.done():
                del self._writing[name]
                if not self._errors:
                    self._names.add(name)
        if self._errors and self.off is None:
            self._turn_off(self._errors[0])

    def _make_room(self, num_coming: int) -> None:
        while len(self._names) and len(self._names) + len(self._writing) + num_coming > self.num_blocks:
            self._forget(self._names.evict())

    def _remove(self, name: bytes) -> None:
        self._names.remove(name)
        self._forget(name)

    def _forget(self, name: bytes) -> None:
        self._reading.pop(name, None)
        self._writer.submit(self._unlink, name)

    # In the threads.

    def _write(self, name: bytes, content: bytes) -> None:
        path = self._path(name)
        beside = path.with_suffix(f".{os.getpid()}")
        try:
            beside.write_bytes(_sum(content) + content)
            beside.replace(path)
        except OSError as error:
            self._errors.append(error)
            with suppress(OSError):
                beside.unlink(missing_ok=True)

    def _read(self, name: bytes) -> Tensor | None:
        try:
            content = self._path(name).read_bytes()
        except OSError:
            return None
        block = content[_SUM_BYTES:]
        if len(block) != self._block_bytes or _sum(block) != content[:_SUM_BYTES]:
            return None
        return torch.frombuffer(bytearray(block), dtype=torch.uint8)

    def _unlink(self, name: bytes) -> None:
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: bytes) -> Path:
        return self.folder / f"{name.hex()}{_SUFFIX}"

    def _turn_off(self, error: OSError) -> None:
        self.off = f"the file tier in {self.folder} is off: {error.strerror or error}"
        warnings.warn(self.off, stacklevel=3)


def _sum(content: bytes) -> bytes:
    return blake2b(content, digest_size=_SUM_BYTES).digest()
