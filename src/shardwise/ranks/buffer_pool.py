"""Memory that is lent for a short time, again and again: to take it anew each time would cost as much as to fill it."""

from threading import Lock

import torch
from torch import Tensor


class BufferPool:
    """Memory lent for one backward after the other, each size apart. It may be given back by another thread."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        self._lock = Lock()

    def take(self, length: int, like: Tensor) -> Tensor:
        with self._lock:
            free = self._free.get((length, like.dtype, like.device))
            if free:
                return free.pop()
        return like.new_empty(length)

    def give_back(self, memory: Tensor) -> None:
        with self._lock:
            self._free.setdefault((memory.numel(), memory.dtype, memory.device), []).append(memory)

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for free in self._free.values() for each in free)
