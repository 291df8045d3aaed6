"""Keep memory alive while a copy still reads or writes it.

The code that starts a copy hands the tensor over together with the copy's event once it needs the tensor no longer.
`sweep` releases tensors in the order in which they came. If copies fall behind, the bytes held are bounded: `sweep`
then blocks the host until enough copies are over.
"""

from collections import deque
from collections.abc import Callable

from torch import Tensor

from shardwise.dataflow.streams import Event


class DeferredFree:
    """Tensors that only copies still need. At most `most_bytes` of them remain after a sweep."""

    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._held: deque[tuple[Event, tuple[Tensor, ...], Callable[[], None] | None]] = deque()

    def hold(self, event: Event, *memory: Tensor, then: Callable[[], None] | None = None) -> None:
        """Keep tensors until an event is reached; call `then` when they are released.

        This never blocks, so it may be called anywhere.
        """
        self._held.append((event, memory, then))
        self.num_bytes += sum(each.nbytes for each in memory)

    def grow(self, num_bytes: int) -> None:
        """Raise the limit on the bytes that remain after a sweep."""
        self._most_bytes += num_bytes

    def sweep(self) -> None:
        """Release tensors whose copies are over, and wait for the oldest while more than the limit is held."""
        self._sweep(self._most_bytes)

    def wait(self) -> None:
        """Wait for all copies and release all tensors."""
        self._sweep(0)

    def _sweep(self, most_bytes: int) -> None:
        while self._held and (self.num_bytes > most_bytes or self._held[0][0].is_done()):
            event, memory, then = self._held.popleft()
            event.wait()
            self.num_bytes -= sum(each.nbytes for each in memory)
            if then is not None:
                then()
