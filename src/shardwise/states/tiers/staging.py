"""Staging buffers: device memory for state from the host that is updated there, chunk by chunk.

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

#: The share of a GPU's memory for staging buffers, and the share of the memory that was never used. State that is
#: there when a backward begins need not be copied during it; the rest is for larger batches than those so far.
PART_OF_ALL, _PART_OF_SPARE = 1 / 12, 1 / 2


class StagingBuffers:
    """A number of buffers, each as large as its largest chunk so far."""

    def __init__(self, count: int, copies: CopyStreams) -> None:
        self._copies = copies
        self._memory: list[Tensor | None] = []
        #: Free buffers, with events after which they may be used.
        self._free: deque[tuple[int, list[Event]]] = deque()
        self.grow(count)

    @property
    def are_free(self) -> bool:
        """Whether there is one to take."""
        return bool(self._free)

    def grow(self, count: int) -> None:
        """Provide at least this many buffers. Memory is allocated with the first chunk."""
        for _ in range(count - len(self._memory)):
            self._free.append((len(self._memory), []))
            self._memory.append(None)

    def fill(self, size: int) -> None:
        """Allocate this many bytes for each now, in the caller's stream, which is that of the computation."""
        self._memory = [torch.empty(size, dtype=torch.uint8, device=self._copies.device) for _ in self._memory]
        computed = self._copies.computed()
        self._free = deque((buffer, [*gone, *computed]) for buffer, gone in self._free)

    def take(self, likes: Sequence[Tensor]) -> tuple[int, list[Tensor], list[Event]]:
        """Return a buffer with space for tensors like these, and events after which it may be written."""
        buffer, gone = self._free.popleft()
        packing, memory = Packing.of(likes), self._memory[buffer]
        if memory is None or memory.numel() < packing.num_bytes:
            for event in gone:
                event.wait()
            memory = torch.empty(packing.num_bytes, dtype=torch.uint8, device=self._copies.device)
            self._memory[buffer] = memory
            gone = self._copies.computed()  # Newly allocated memory may still be in use by earlier computation.
        return buffer, packing.views(memory), gone

    def has(self, buffer: int, tensor: Tensor) -> bool:
        """Whether a tensor lies in a buffer."""
        memory = self._memory[buffer]
        return memory is not None and storage_of(memory) == storage_of(tensor)

    def give_back(self, buffer: int, gone: Sequence[Event]) -> None:
        """Return a buffer, which is free once these events are reached."""
        self._free.append((buffer, list(gone)))

    def clear(self) -> None:
        """Free the memory, which must not be in use."""
        self._memory = [None] * len(self._memory)


def spare_bytes(device: torch.device) -> int:
    """Return the memory that staging may use in addition to what plans count: a share of what was never used."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(min(free * _PART_OF_SPARE, total * PART_OF_ALL))
