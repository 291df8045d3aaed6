"""Checksums of blocks. Reading a part of a box verifies only the blocks that contain it.

a box of 3.5 blocks      |  0  |  1  |  2  | 3 |
some of its rows               [-----]              blocks 1 and 2 are read and verified
"""

import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from shardwise.training.checkpoint.boxes import Box

#: One checksum for this many bytes of a box: 4 MB of checksums for a terabyte. At most two additional blocks are read,
#: at the ends of a contiguous run.
BLOCK_BYTES = 1 << 20


class Checksums:
    """The checksums of a box whose bytes arrive in chunks of any length. Blocks begin at fixed offsets in the box."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._at = 0

    def count_in(self, chunk: Any) -> Iterator[Any]:
        """Yield the next bytes of the box in pieces of at most a block, and add each to the checksums."""
        start = 0
        while start < len(chunk):
            inside = self._at % BLOCK_BYTES
            piece = chunk[start : start + BLOCK_BYTES - inside]
            if not inside:
                self.numbers.append(0)
            self.numbers[-1] = checksum(piece, self.numbers[-1])
            start += len(piece)
            self._at += len(piece)
            yield piece


def touched(part: Box, whole: Box, item_bytes: int, block_bytes: int) -> Iterator[range]:
    """Yield the blocks of a stored box that contain a part of it, as ranges that may overlap."""
    starts = [start - first for start, first in zip(part.start, whole.start, strict=True)]
    yield from _runs(starts, part.size, whole.size, 0, item_bytes, block_bytes)


def _runs(
    starts: Sequence[int], size: Sequence[int], whole: Sequence[int], offset: int, item_bytes: int, block_bytes: int
) -> Iterator[range]:
    """Yield the ranges of the inner dims, `offset` bytes into the box. Indices closer than a block are one range."""
    if not size:
        yield range(offset // block_bytes, (offset + item_bytes - 1) // block_bytes + 1)
        return
    stride = prod(whole[1:]) * item_bytes
    first = offset + starts[0] * stride
    if stride > block_bytes:
        for number in range(size[0]):
            yield from _runs(starts[1:], size[1:], whole[1:], first + number * stride, item_bytes, block_bytes)
        return
    # From the first element of the first index to the last element of the last.
    begin, end = first, first + (size[0] - 1) * stride + item_bytes
    for at in range(1, len(size)):
        inner = prod(whole[at + 1 :]) * item_bytes
        begin += starts[at] * inner
        end += (starts[at] + size[at] - 1) * inner
    yield range(begin // block_bytes, (end - 1) // block_bytes + 1)


def checksum(data: Any, before: int = 0) -> int:
    """Return the CRC-32 of `data`, continuing from the checksum `before` of the preceding bytes."""
    return zlib.crc32(data, before)
