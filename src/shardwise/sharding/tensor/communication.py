"""Communication of tensor-parallel layers: the input of a layer is received, and its output sent, in chunks.

    columns     forward   receive, multiply         backward   multiply, send
    rows        forward   multiply, send            backward   receive, multiply

                       receive          send
    NoCommunication    nothing          nothing           no other rank takes part
    AllReduce          nothing          all-reduce        every rank has all tokens (Megatron-LM, Shoeybi et al. 2019)
    SequenceShards     all-gather       reduce-scatter    every rank has some of the tokens (Korthikanti et al. 2022)

While a chunk is multiplied, the previous one is being sent, or the next one received. The layout here is (batch, rank,
token of that rank's shard, channel), so that a chunk has equally many tokens of every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.ranks.collectives import (
    Group,
    filled,
    longest_piece,
    span_of,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)

#: Below this size latency dominates: an all-reduce over 8 GPUs of a node has a latency of 69 and 40 microseconds and a
#: bandwidth of 226 and 459 GB/s (A100, H200: fits to published sweeps); the two terms are equal at 9 and 10 MB.
LEAST_CHUNK_BYTES = 8 * 2**20
#: Of four chunks three are hidden. More chunks hide little more, and their smaller matmuls use a GPU less well.
MOST_CHUNKS = 4


class Chunk(NamedTuple):
    """Rows of a layer: some sequences, or some tokens of every rank's piece of them."""

    batch: slice = slice(None)
    tokens: slice = slice(None)

    def of(self, laid: Tensor) -> Tensor:
        """Return the chunk of a tensor laid out as (batch, rank, token, channel)."""
        return laid[self.batch, :, self.tokens]

    def rows(self, laid: Tensor) -> Tensor:
        """Return the chunk as (rows, channels)."""
        return self.of(laid).flatten(0, 2)


#: Computes the rows of a chunk into a tensor of (rows, channels).
Multiply = Callable[[Chunk, Tensor], None]


class NoCommunication:
    """A layer that this rank computes alone. `shape` is that of the layer's input, without channels."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, self.batch, self.num_pieces, self.size = tuple(shape), 1, 1, prod(shape)

    def lay(self, whole: Tensor) -> Tensor:
        """Lay out all tokens as (batch, rank, token, channel)."""
        return whole.reshape(self.batch, self.num_pieces, self.size, whole.shape[-1])

    def room(self, width: int, like: Tensor) -> Tensor:
        """Allocate `width` channels for all tokens."""
        return like.new_empty((self.batch, self.num_pieces, self.size, width))

    def whole(self, laid: Tensor) -> Tensor:
        """Return all tokens in the shape of the layer's input."""
        return laid.view(*self.shape, laid.shape[-1])

    def receive(self, given: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """Yield the rows of all tokens, chunk by chunk as they arrive."""
        yield Chunk(), given.reshape(-1, given.shape[-1])

    def send(self, width: int, like: Tensor, multiply: Multiply) -> Callable[[], Tensor]:
        """Compute chunk by chunk and start sending each. Return a function that waits and returns the result."""
        laid = self.room(width, like)
        multiply(Chunk(), Chunk().rows(laid))
        return lambda: self.whole(laid)


class AllReduce(NoCommunication):
    """A layer with all tokens on every rank. Each rank computes a partial sum of every element."""

    def __init__(self, shape: Sequence[int], group: Group, num_chunks: int | None) -> None:
        super().__init__(shape)
        self._group, self._num_chunks = group, num_chunks

    def send(self, width: int, like: Tensor, multiply: Multiply) -> Callable[[], Tensor]:
        laid = self.room(width, like)
        pending = []
        for part in _parts(self.size, count_chunks(_bytes_of(laid), like.device, self._num_chunks)):
            chunk = Chunk(tokens=part)
            multiply(chunk, chunk.rows(laid))
            pending.append(start_all_reduce(chunk.rows(laid), self._group))

        def finish() -> Tensor:
            for each in pending:
                each.finish()
            return self.whole(laid)

        return finish


class SequenceShards(NoCommunication):
    """A layer whose sequences, of `length` tokens in the last dim of `shape`, are sharded over the ranks."""

    def __init__(self, shape: Sequence[int], length: int, group: Group, num_chunks: int | None) -> None:
        super().__init__(shape)
        self.batch, self.num_pieces = prod(shape) // length, group.size
        self.size = longest_piece(length, group.size)
        start, stop = span_of(length, group)
        self._length, self._own = length, stop - start
        self._shape_of_own = (*self.shape[:-1], self.shape[-1] // length * self._own)
        self._group, self._num_chunks = group, num_chunks

    def lay(self, whole: Tensor) -> Tensor:
        tokens = whole.reshape(self.batch, self._length, whole.shape[-1])
        return super().lay(filled(tokens, 1, self.num_pieces * self.size))

    def whole(self, laid: Tensor) -> Tensor:
        tokens = laid.view(self.batch, self.num_pieces * self.size, laid.shape[-1])
        return tokens[:, : self._length].reshape(*self.shape, laid.shape[-1]).contiguous()

    def receive(self, given: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        width = given.shape[-1]
        piece = filled(given.reshape(self.batch, self._own, width), 1, self.size)
        chunks = self._chunks(self.num_pieces * _bytes_of(piece), piece.device)
        pending = [start_all_gather(piece[chunk.batch, chunk.tokens], self._group, 1) for chunk in chunks]
        for chunk, each in zip(chunks, pending, strict=True):
            yield chunk, each.finish().flatten(0, 1)

    def send(self, width: int, like: Tensor, multiply: Multiply) -> Callable[[], Tensor]:
        num_rows = self.batch * self.num_pieces * self.size
        chunks = self._chunks(num_rows * width * like.element_size(), like.device)
        pending = []
        for chunk in chunks:
            batch, tokens = len(range(self.batch)[chunk.batch]), len(range(self.size)[chunk.tokens])
            rows = like.new_empty((batch * self.num_pieces * tokens, width))
            multiply(chunk, rows)
            pending.append(start_reduce_scatter(rows.view(batch, -1, width), self._group, 1))

        def finish() -> Tensor:
            pieces = [each.finish() for each in pending]
            piece = pieces[0] if len(pieces) == 1 else torch.cat(pieces, self._along)
            return piece[:, : self._own].reshape(*self._shape_of_own, width).contiguous()

        return finish

    @property
    def _along(self) -> int:
        """The dim along which chunks are cut: the batch if it has several sequences, or else the tokens."""
        return 0 if self.batch > 1 else 1

    def _chunks(self, num_bytes: int, device: torch.device) -> list[Chunk]:
        count = count_chunks(num_bytes, device, self._num_chunks)
        if self._along == 0:
            return [Chunk(batch=part) for part in _parts(self.batch, count)]
        return [Chunk(tokens=part) for part in _parts(self.size, count)]


def count_chunks(num_bytes: int, device: torch.device, wanted: int | None) -> int:
    """Return the number of chunks for this many bytes: `wanted` if the user gave it.

    On a CPU it is one: the cores that would compute the next chunk also transfer the last one, and two chunks take 1 to
    3 % longer (hidden 512, 8 layers, 2 x 256 tokens, 2 ranks of one thread, torch 2.13).
    """
    if wanted is not None:
        return wanted
    return 1 if device.type != "cuda" else max(1, min(MOST_CHUNKS, num_bytes // LEAST_CHUNK_BYTES))


def _bytes_of(tensor: Tensor) -> int:
    """Return the size in bytes. `nbytes` would not compile with dynamic shapes."""
    return tensor.numel() * tensor.element_size()


def _parts(length: int, count: int) -> list[slice]:
    """Split a length into `count` parts, or fewer if it is shorter. Their sizes differ by one at most."""
    count = max(1, min(count, length))
    ends = [length * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]
