"""Memory that a copy still reads or writes: nobody else may have it until the copy is over.

Whoever starts a copy and needs the tensor no longer hands it over with the copy's event. It is let go in the order in
which it came, when somebody looks. Where copies fall behind, only so many bytes are held: then the host waits.
"""

from collections import deque
from collections.abc import Callable

from torch import Tensor

from shardwise.dataflow.streams import Event


class DeferredFree:
    """Tensors that nobody needs but copies. At most `most_bytes` of them stay after a sweep."""

    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._held: deque[tuple[Event, tuple[Tensor, ...], Callable[[], None] | None]] = deque()

    def hold(self, event: Event, *memory: Tensor, then: Callable[[], None] | None = None) -> None:
        """Keep tensors until an event is reached; `then` is called when they are let go.

        This waits for nothing, so it may be done anywhere.
        """
        self._held.append((event, memory, then))
        self.num_bytes += sum(each.nbytes for each in memory)

    def grow(self, num_bytes: int) -> None:
        """So many bytes more may stay after a sweep."""
        self._most_bytes += num_bytes

    def sweep(self) -> None:
        """Let go of what is over, and wait for the oldest as long as too much is held."""
        self._sweep(self._most_bytes)

    def wait(self) -> None:
        """Wait for all copies, and let go of all."""
        self._sweep(0)

    def _sweep(self, most_bytes: int) -> None:
        while self._held and (self.num_bytes > most_bytes or self._held[0][0].is_done()):
            event, memory, then = self._held.popleft()
            event.wait()
            self.num_bytes -= sum(each.nbytes for each in memory)
            if then is not None:
                then()
