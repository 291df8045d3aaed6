"""Memory of the device for what visits it: a few slots, which one visitor after the other has."""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.dataflow.streams import Mark
from shardwise.runtime.offload.crossing import Crossing

#: Where a tensor may begin in a slot.
_ALIGNMENT = 256


class Slots:
    """So many slots, each as large as the largest visitor that it has had."""

    def __init__(self, count: int, crossing: Crossing) -> None:
        self._crossing = crossing
        self._memory: list[Tensor | None] = [None] * count
        #: Those that nobody has, and when the last one to have it is gone.
        self._free: deque[tuple[int, list[Mark]]] = deque((number, []) for number in range(count))

    @property
    def are_free(self) -> bool:
        """Whether there is one to take."""
        return bool(self._free)

    def take(self, visitors: Sequence[Mapping[str, Tensor]]) -> tuple[int, list[dict[str, Tensor]], list[Mark]]:
        """A slot with places for tensors like these, and marks after which they may be written."""
        slot, gone = self._free.popleft()
        size = sum(_aligned(each.nbytes) for visitor in visitors for each in visitor.values())
        memory = self._memory[slot]
        if memory is None or memory.numel() < size:
            for mark in gone:
                mark.wait()
            memory = self._memory[slot] = torch.empty(size, dtype=torch.uint8, device=self._crossing.device)
        found, at = [], 0
        for visitor in visitors:
            places = {}
            for key, each in visitor.items():
                places[key] = memory[at : at + each.nbytes].view(each.dtype).view(each.shape)
                at += _aligned(each.nbytes)
            found.append(places)
        # Memory that was just taken has been somebody else's until now.
        return slot, found, [*gone, *self._crossing.computed()]

    def give_back(self, slot: int, gone: Sequence[Mark]) -> None:
        """Nobody has a slot any more once some marks are reached."""
        self._free.append((slot, list(gone)))

    def clear(self) -> None:
        """Give the memory back. Nobody may be in it."""
        self._memory = [None] * len(self._memory)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
