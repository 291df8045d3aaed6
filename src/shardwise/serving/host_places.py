"""Room for blocks in host memory, pinned where a GPU copies to and from it; handed out and given back.

Copies of a GPU are begun, and nobody waits for them. So a place has the event of its last copy: whoever uses the place
next waits for that first, a stream on the device, or a thread here. Nothing else keeps copies in order.
"""

from collections import deque
from typing import Any

import torch


class HostPlaces:
    """`count` places of one size. Any thread may take one, give one back, and wait for one."""

    def __init__(self, count: int, block_bytes: int, *, pinned: bool = False) -> None:
        data = torch.empty(count, block_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned and count > 0)
        #: One tensor a place: to make one takes as long as to begin its copy.
        self.views = data.unbind()
        #: The event behind which the bytes of a place are what they should be, and nobody reads them any more.
        self.last: dict[int, Any] = {}
        # Whoever was given back first is taken first: its copies are over.
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
        """Wait here for the last copy."""
        event = self.last.get(place)
        if event is not None:
            event.synchronize()
