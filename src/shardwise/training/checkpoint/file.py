"""A memory-mapped safetensors file of a checkpoint. Data is verified against its checksums before it is returned."""

import json
import mmap
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.training.checkpoint.blocks import checksum, touched
from shardwise.training.checkpoint.boxes import Box
from shardwise.training.checkpoint.index import FileOutline, Stored, without

#: The dtype names of safetensors.
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
# For fewer blocks than this no threads are started.
_FEW_BLOCKS = 8


def header_of(content: dict[str, Any]) -> bytes:
    """Return the first bytes of a file: the length of the JSON header, and the header, padded to 8 bytes."""
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


class StoredFile:
    """An open file. `outline` is its entry in the index, None in format 1. `bytes_compared` counts verified bytes."""

    def __init__(self, path: Path, outline: FileOutline | None) -> None:
        self._path, self.bytes_compared = path, 0
        try:
            with path.open("rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                header = self._read_header(file, outline)
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise self._damage(f"it cannot be read: {error.strerror}") from None
        self._data = len(header)
        try:
            self._places: dict[str, Any] = json.loads(header[_LENGTH.size :])
        except ValueError:
            raise self._damage("its header is not valid JSON") from None
        self._compared: dict[str, set[int]] = {}

    def _read_header(self, file: Any, outline: FileOutline | None) -> bytes:
        if outline is not None and self._size != outline.num_bytes:
            raise self._damage(f"it has {self._size} bytes, and {outline.num_bytes} were written")
        start: bytes = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else self._size
        if _LENGTH.size + length > self._size:
            raise self._damage(f"it has {self._size} bytes, and its header does not fit in")
        header: bytes = start + file.read(length)
        if outline is not None and checksum(header) != outline.header_checksum:
            raise self._damage("its header is not the one that was written")
        return header

    def read(self, stored: Stored, dtype: torch.dtype, part: Box, block_bytes: int | None) -> Tensor:
        """Return a part of a box, in the mapped memory. Without `block_bytes` the whole box is one block."""
        at, num_bytes = self._place(stored, dtype)
        if not num_bytes:
            return torch.empty(part.size, dtype=dtype)
        self._compare(stored, at, num_bytes, part, dtype.itemsize, block_bytes or num_bytes)
        numbers = torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=at)
        if at % dtype.itemsize:  # The dtype needs an aligned address.
            numbers = numbers.clone()
        return numbers.view(dtype).view(stored.box.size)[part.within(stored.box)]

    def _place(self, stored: Stored, dtype: torch.dtype) -> tuple[int, int]:
        """Return the offset of a box in the file and its number of bytes, from the header."""
        try:
            place = self._places[stored.key]
            start, stop = map(int, place["data_offsets"])
            found = (place["dtype"], tuple(place["shape"]), stop - start)
        except (KeyError, TypeError, ValueError):
            raise self._damage(f"it says nothing of {stored.key}") from None
        num_bytes = prod(stored.box.size) * dtype.itemsize
        if found != (TYPES[dtype], stored.box.size, num_bytes) or not 0 <= start <= stop <= self._size - self._data:
            raise self._damage(f"{stored.key} in it is not as the index has it")
        return self._data + start, num_bytes

    def _compare(self, stored: Stored, at: int, num_bytes: int, part: Box, item_bytes: int, block_bytes: int) -> None:
        """Verify the blocks that contain the part, except those verified before."""
        compared, memory = self._compared.setdefault(stored.key, set()), memoryview(self._memory)
        runs = touched(part, stored.box, item_bytes, block_bytes)
        blocks = sorted({block for run in runs for block in run} - compared)
        ends = [(at + each * block_bytes, at + min((each + 1) * block_bytes, num_bytes)) for each in blocks]

        for block, (start, stop), number in zip(blocks, ends, _checksums(memory, ends), strict=True):
            if block >= len(stored.checksums) or number != stored.checksums[block]:
                raise ShardwiseError(
                    f"{stored.key} in {self._path} is damaged between the bytes {start} and {stop}: their checksum is"
                    " not the one that was written",
                    remedy=without(self._path.parent),
                )
        compared.update(blocks)
        self.bytes_compared += sum(stop - start for start, stop in ends)

    def _damage(self, why: str) -> ShardwiseError:
        return ShardwiseError(f"{self._path} is damaged: {why}", remedy=without(self._path.parent))


def _checksums(memory: memoryview, ends: Sequence[tuple[int, int]]) -> list[int]:
    """Return the checksums of ranges of memory, with as many threads as torch has. One core does 1 to 3 GB/s."""

    def one(end: tuple[int, int]) -> int:
        return checksum(memory[slice(*end)])

    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(ends) < _FEW_BLOCKS:
        return [one(end) for end in ends]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(one, ends))
