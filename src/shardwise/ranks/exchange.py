"""The interface of sums and gathers between replicas beside computation, and a pool of buffers for them."""

from collections.abc import Callable
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from shardwise.ranks.collectives import Group

Then = Callable[[], None]


class Ticket(Protocol):
    """An operation in progress."""

    def wait(self) -> None: ...


class Exchange(Protocol):
    """Sums and gathers between replicas. All ranks of a group make the same calls, in the same order.

    `channel` identifies the data, with the same number on all ranks. `then` is called when the result is there, before
    any wait for it ends.
    """

    def sum_to_shards(self, flat: Tensor, group: Group, channel: int, then: Then | None = None) -> Ticket:
        """Make this rank's piece of `flat` the sum of all ranks' piece there."""
        ...

    def sum_to_all(self, flat: Tensor, group: Group, channel: int, *, follows: bool = False) -> Ticket:
        """Make `flat` the sum over all ranks. `follows`: its input is the result of the previous sum."""
        ...

    def gather(self, flat: Tensor, shard: Tensor, group: Group, channel: int, *, lends: bool = False) -> Ticket:
        """Fill `flat` with every rank's shard. A shard may be the piece of `flat` where it belongs.

        `lends`: after the wait, the caller may reuse the shard's memory.
        """
        ...

    def settle(self) -> None:
        """Wait until what was sent has left: then shards may be written to."""
        ...

    def close(self) -> None: ...


class Done:
    """A ticket without anything to wait for."""

    def wait(self) -> None:
        pass


class BufferPool:
    """Buffers reused from one backward to the next, by size. Another thread may give them back.

    Allocating them anew each time would cost as much as filling them.
    """

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
