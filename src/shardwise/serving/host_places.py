"""Places for blocks in host memory, pinned where a GPU copies to and from it.

A GPU's copies are asynchronous. Each place therefore keeps the event of its last copy, and the next user of the place
waits for it first: a stream on the device, or a thread on the host. Nothing else orders copies.
"""

from collections import deque
from typing import Any

import torch


class HostPlaces:
    """`count` places of one size. Any thread may take one, give one back, or wait for one."""

    def __init__(self, count: int, block_bytes: int, *, pinned: bool = False) -> None:
        data = torch.empty(count, block_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned and count > 0)
        #: One tensor per place: making a view takes as long as launching its copy.
        self.views = data.unbind()
        #: The event after which the bytes of a place are valid and no copy reads them any more.
        self.last: dict[int, Any] = {}
        # First in, first out: the place that was given back first is the likeliest to have no copy running.
        self._free = deque(range(count))

    def __len__(self) -> int:
        return len(self.views)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def wait(self, place: int) -> None:
        """Block the calling thread until the last copy is done."""
        event = self.last.get(place)
        if event is not None:
            event.synchronize()
