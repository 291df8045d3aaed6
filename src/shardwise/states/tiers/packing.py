"""Tensors packed one behind the other in a run of bytes, so that one copy moves all of them.

    run     | q_proj      | k_proj  ··| v_proj  ··| norm ·|        dots are padding up to the next alignment
    start   0             a           b           c

Both ends of a copy are packed alike. Then whatever lies side by side at both ends is one copy: `coalesce`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.torch_private import storage_id

#: Bytes. Memory that CUDA allocates begins at a multiple of this too, so a packed tensor is aligned as any other.
ALIGNMENT = 256


def pack(sizes: Iterable[int], alignment: int) -> tuple[list[int], int]:
    """Where runs of these sizes begin, each at a multiple of `alignment`, and where the last one ends."""
    starts: list[int] = []
    end = 0
    for size in sizes:
        starts.append(-(-end // alignment) * alignment)
        end = starts[-1] + size
    return starts, end


@dataclass(frozen=True, slots=True)
class Packed:
    """Where one tensor lies in a run of bytes."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, memory: Tensor) -> Tensor:
        """The tensor in a run of bytes."""
        return memory[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Packing:
    """How some tensors lie in a run of `num_bytes`."""

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
        """The tensors in a run of bytes, which may be longer."""
        return [each.of(memory) for each in self.tensors]


def coalesce(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Copies that do what these would do, and are fewer: of what is packed alike at both ends one is made."""
    run: list[tuple[Tensor, Tensor]] = []
    for pair in pairs:
        if run and not _are_adjacent(run[-1], pair):
            yield _as_one(run)
            run = []
        run.append(pair)
    if run:
        yield _as_one(run)


def storage_of(tensor: Tensor) -> int:
    """What tells the storage of a tensor from others. It stays the same where its memory comes and goes."""
    return storage_id(tensor.untyped_storage())


def _are_adjacent(before: tuple[Tensor, Tensor], pair: tuple[Tensor, Tensor]) -> bool:
    """Whether nothing but padding is between the two, and the same at both ends."""
    gaps = set()
    for one, other in zip(before, pair, strict=True):
        if storage_of(one) != storage_of(other):
            return False
        start, end = _start(other), _start(one) + one.nbytes
        gaps.add(start - end if start in (end, -(-end // ALIGNMENT) * ALIGNMENT) else None)
    return len(gaps) == 1 and None not in gaps


def _as_one(run: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    first, last = run[0], run[-1]
    if len(run) == 1:
        return first
    one, other = (_bytes_between(*ends) for ends in zip(first, last, strict=True))
    return one, other


def _bytes_between(first: Tensor, last: Tensor) -> Tensor:
    """The memory from the beginning of one tensor to the end of another."""
    start, end = _start(first), _start(last) + last.nbytes
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(
        first.untyped_storage(), start, (end - start,), (1,)
    )


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()
