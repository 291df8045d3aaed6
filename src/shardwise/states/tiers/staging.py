"""Staging buffers: memory of the device for what comes from the host to be updated, one chunk after the other.

    empty  --take-->  taken  --give_back(events)-->  free once the events are reached  --take--> ...

Host memory is packed as a staging buffer is (`packing.py`), so most chunks are one copy each way, however many tensors
they have.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.packing import Packing, storage_of

#: The part of a GPU's memory that staging buffers may have, and of what was never needed of it. State that is there
#: when a backward begins need not come in under it; the rest is for larger batches than those so far.
PART_OF_ALL, _PART_OF_SPARE = 1 / 12, 1 / 2


class StagingBuffers:
    """So many buffers, each as large as the largest chunk that it has had."""

    def __init__(self, count: int, copies: CopyStreams) -> None:
        self._copies = copies
        self._memory: list[Tensor | None] = []
        #: Those that nobody has, and when the last one to have it is gone.
        self._free: deque[tuple[int, list[Event]]] = deque()
        self.grow(count)

    @property
    def are_free(self) -> bool:
        """Whether there is one to take."""
        return bool(self._free)

    def grow(self, count: int) -> None:
        """Have at least so many buffers. Memory is taken when the first chunk comes to them."""
        for _ in range(count - len(self._memory)):
            self._free.append((len(self._memory), []))
            self._memory.append(None)

    def fill(self, size: int) -> None:
        """Take memory of so many bytes for each now. The caller's stream is the one that others compute in."""
        self._memory = [torch.empty(size, dtype=torch.uint8, device=self._copies.device) for _ in self._memory]
        computed = self._copies.computed()
        self._free = deque((buffer, [*gone, *computed]) for buffer, gone in self._free)

    def take(self, likes: Sequence[Tensor]) -> tuple[int, list[Tensor], list[Event]]:
        """A buffer with places for tensors like these, and events after which they may be written."""
        buffer, gone = self._free.popleft()
        packing, memory = Packing.of(likes), self._memory[buffer]
        if memory is None or memory.numel() < packing.num_bytes:
            for event in gone:
                event.wait()
            memory = torch.empty(packing.num_bytes, dtype=torch.uint8, device=self._copies.device)
            self._memory[buffer] = memory
            gone = self._copies.computed()  # Memory that was just taken has been somebody else's until now.
        return buffer, packing.views(memory), gone

    def has(self, buffer: int, tensor: Tensor) -> bool:
        """Whether a tensor lies in a buffer."""
        memory = self._memory[buffer]
        return memory is not None and storage_of(memory) == storage_of(tensor)

    def give_back(self, buffer: int, gone: Sequence[Event]) -> None:
        """Nobody has a buffer any more once some events are reached."""
        self._free.append((buffer, list(gone)))

    def clear(self) -> None:
        """Give the memory back. Nobody may use it."""
        self._memory = [None] * len(self._memory)


def spare_bytes(device: torch.device) -> int:
    """What staging may have of a GPU's memory beside the buffers that plans count: part of what nobody has needed."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(min(free * _PART_OF_SPARE, total * PART_OF_ALL))
