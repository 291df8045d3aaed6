"""KV blocks in files of one folder, a file a block, found again after a restart.

    NAME.kv     16 bytes of checksum, then the block

A file appears under its name only when it is whole. One that cannot be read, is too short or does not fit its checksum
is a miss, and goes. A disk that is full or cannot be written to turns the tier off, with one line: nothing else fails.
"""

import os
import warnings
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

_SUFFIX = ".kv"
_SUM_BYTES = 16


class FileTier:
    """At most `num_bytes` of files; who was longest not asked for goes first. `off` says why it is, if it is."""

    def __init__(self, folder: Path, num_bytes: int, block_bytes: int) -> None:
        self.folder, self._block_bytes = folder, block_bytes
        self.num_blocks = num_bytes // (block_bytes + _SUM_BYTES)
        self.off: str | None = None
        self._names: OrderedDict[bytes, None] = OrderedDict()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = [(each.stat().st_mtime_ns, each.stem) for each in folder.glob(f"*{_SUFFIX}")]
        except OSError as error:
            self._turn_off(error)
            return
        for _, stem in sorted(known):
            with suppress(ValueError):  # Somebody else's file.
                self._names[bytes.fromhex(stem)] = None
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def put(self, name: bytes, block: Tensor) -> None:
        """Write a block, unless it is there already."""
        if self.off is not None or not self.num_blocks:
            return
        if name in self._names:
            self._names.move_to_end(name)
            return
        self._make_room(1)
        path, content = self._path(name), block.numpy().tobytes()
        beside = path.with_suffix(f".{os.getpid()}")
        try:
            beside.write_bytes(_sum(content) + content)
            beside.replace(path)
        except OSError as error:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            self._turn_off(error)
            return
        self._names[name] = None

    def find(self, name: bytes) -> Tensor | None:
        """Its bytes if they are whole."""
        if name not in self._names:
            return None
        try:
            content = self._path(name).read_bytes()
        except OSError:
            content = b""
        block = content[_SUM_BYTES:]
        if len(block) != self._block_bytes or _sum(block) != content[:_SUM_BYTES]:
            self._remove(name)
            return None
        self._names.move_to_end(name)
        return torch.frombuffer(bytearray(block), dtype=torch.uint8)

    def _make_room(self, num_coming: int) -> None:
        while self._names and len(self._names) + num_coming > self.num_blocks:
            self._remove(next(iter(self._names)))

    def _remove(self, name: bytes) -> None:
        del self._names[name]
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: bytes) -> Path:
        return self.folder / f"{name.hex()}{_SUFFIX}"

    def _turn_off(self, error: OSError) -> None:
        self.off = f"the file tier in {self.folder} is off: {error.strerror or error}"
        warnings.warn(self.off, stacklevel=3)


def _sum(content: bytes) -> bytes:
    return blake2b(content, digest_size=_SUM_BYTES).digest()
