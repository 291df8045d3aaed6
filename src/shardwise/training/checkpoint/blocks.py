"""Checksums of blocks: whoever reads a part of a box compares the blocks that it lies in, and no others.

a box of 3.5 blocks      |  0  |  1  |  2  | 3 |
some of its rows               [-----]              blocks 1 and 2 are read and compared
"""

import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from shardwise.training.checkpoint.boxes import Box

#: One checksum for so many bytes of a box: 4 MB of them for a terabyte, and at most two blocks more than were asked for
#: are read at either end of a run.
BLOCK_BYTES = 1 << 20


class Checksums:
    """Those of a box whose bytes come in chunks of any length: where blocks begin is by their place in the box."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._at = 0

    def count_in(self, chunk: Any) -> Iterator[Any]:
        """The next bytes of the box, in pieces of at most a block; each is counted in when it is given out."""
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
    """The blocks of a stored box in which a part of it lies, as runs that may overlap."""
    starts = [start - first for start, first in zip(part.start, whole.start, strict=True)]
    yield from _runs(starts, part.size, whole.size, 0, item_bytes, block_bytes)


def _runs(
    starts: Sequence[int], size: Sequence[int], whole: Sequence[int], offset: int, item_bytes: int, block_bytes: int
) -> Iterator[range]:
    """Those of the inner dims, `offset` bytes into the box. Indices nearer than a block are one run."""
    if not size:
        yield range(offset // block_bytes, (offset + item_bytes - 1) // block_bytes + 1)
        return
    stride = prod(whole[1:]) * item_bytes
    first = offset + starts[0] * stride
    if stride > block_bytes:
        for number in range(size[0]):
            yield from _runs(starts[1:], size[1:], whole[1:], first + number * stride, item_bytes, block_bytes)
        return
    # From the first number of the first index to the last number of the last.
    begin, end = first, first + (size[0] - 1) * stride + item_bytes
    for at in range(1, len(size)):
        inner = prod(whole[at + 1 :]) * item_bytes
        begin += starts[at] * inner
        end += (starts[at] + size[at] - 1) * inner
    yield range(begin // block_bytes, (end - 1) // block_bytes + 1)


def checksum(data: Any, before: int = 0) -> int:
    """CRC-32 of some bytes, or of those after others that have the checksum `before`."""
    return zlib.crc32(data, before)
