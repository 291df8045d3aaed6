"""Pinned buffers that are used in turn, between a file and the device."""

from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from shardwise.dataflow.streams import Event


class PinnedBuffer:
    """Pinned memory for one copy at a time, and events after which it may be written again."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free: list[Event] = []


class PinnedRing:
    """So many buffers of so many bytes."""

    def __init__(self, pinned: Callable[[tuple[int], torch.dtype], Tensor], count: int, num_bytes: int) -> None:
        self._buffers = cycle([PinnedBuffer(pinned((num_bytes,), torch.uint8)) for _ in range(count)])

    def take(self) -> PinnedBuffer:
        """The next one. Whoever takes it says with `free` when it may be written again."""
        return next(self._buffers)
