"""Tensors packed one after the other in a buffer, so that one copy moves all of them.

    run     | q_proj      | k_proj  ··| v_proj  ··| norm ·|        dots are padding up to the next alignment
    start   0             a           b           c

Both ends of a copy are packed alike. Then whatever is adjacent at both ends is one copy: `coalesce`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.torch_private import storage_id

#: In bytes. CUDA allocations are aligned to it too, so a packed tensor is aligned like any other.
ALIGNMENT = 256


def pack(sizes: Iterable[int], alignment: int) -> tuple[list[int], int]:
    """Return the offsets of blocks of these sizes, each a multiple of `alignment`, and the end of the last one."""
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + size
    return starts, end


@dataclass(frozen=True, slots=True)
class Packed:
    """The place of one tensor in a buffer."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor in a buffer."""
        return memory[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of some tensors in a buffer of `num_bytes`."""

    tensors: tuple[Packed, ...]
    num_bytes: int

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> "Packing":
        """Pack tensors like these, in their order."""
        every = list(tensors)
        starts, end = pack([each.nbytes for each in every], ALIGNMENT)
        packed = (Packed(start, each.nbytes, each.dtype, each.shape) for start, each in zip(starts, every, strict=True))
        return Packing(tuple(packed), end)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer, which may be longer."""
        return [each.of(memory) for each in self.tensors]


def coalesce(pairs: Iterable[tuple[Tensor, Tensor]], *, is_padded: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield fewer copies with the same effect: tensors that are packed alike at both ends become one.

    Without `is_padded`, what is between two tensors may be another one, as between pieces of a bucket."""
    run: list[tuple[Tensor, Tensor]] = []
    for pair in pairs:
        if run and not _are_adjacent(run[-1], pair, is_padded=is_padded):
            yield _as_one(run)
            run = []
        run.append(pair)
    if run:
        yield _as_one(run)


def storage_of(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, which stays the same while its memory is freed and allocated."""
    return storage_id(tensor.untyped_storage())


def _are_adjacent(before: tuple[Tensor, Tensor], pair: tuple[Tensor, Tensor], *, is_padded: bool) -> bool:
    """Whether nothing but padding is between the two, and the same at both ends."""
    gaps = set()
    for one, other in zip(before, pair, strict=True):
        if storage_of(one) != storage_of(other):
            return False
        start, end = _start(other), _start(one) + one.nbytes
        gaps.add(start - end if start in (end, -(-end // ALIGNMENT) * ALIGNMENT) else None)
    return len(gaps) == 1 and None not in gaps and (is_padded or gaps == {0})


def _as_one(run: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    first, last = run[0], run[-1]
    if len(run) == 1:
        return first
    one, other = (_bytes_between(*ends) for ends in zip(first, last, strict=True))
    return one, other


def _bytes_between(first: Tensor, last: Tensor) -> Tensor:
    """Return the memory from the start of one tensor to the end of another."""
    start, end = _start(first), _start(last) + last.nbytes
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(
        first.untyped_storage(), start, (end - start,), (1,)
    )


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()
