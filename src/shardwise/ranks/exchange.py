"""What moves numbers between replicas beside the computation, as the rest sees it, and memory that is lent for that."""

from collections.abc import Callable
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from shardwise.ranks.collectives import Group

Then = Callable[[], None]


class Ticket(Protocol):
    """Something that is under way."""

    def wait(self) -> None: ...


class Exchange(Protocol):
    """What moves numbers between replicas. All of a group ask for the same, in the same order.

    `channel` is the number of what is moved, the same on all ranks. `then` is called when the result is there, before
    anyone's wait for it ends.
    """

    def sum_to_shards(self, flat: Tensor, group: Group, channel: int, then: Then | None = None) -> Ticket:
        """Make this rank's piece of `flat` the sum of all ranks' piece there."""
        ...

    def sum_to_all(self, flat: Tensor, group: Group, channel: int, *, follows: bool = False) -> Ticket:
        """Make `flat` the sum over all ranks. `follows`: it is itself made by the sum that was asked for before."""
        ...

    def gather(self, flat: Tensor, shard: Tensor, group: Group, channel: int, *, lends: bool = False) -> Ticket:
        """Fill `flat` with every rank's shard. A shard may be the piece of `flat` where it belongs.

        `lends`: whoever has waited for it may give the shard's memory away.
        """
        ...

    def settle(self) -> None:
        """Wait until what was sent has left: then shards may be written to."""
        ...

    def close(self) -> None: ...


class Done:
    """Nothing to wait for."""

    def wait(self) -> None:
        pass


class BufferPool:
    """Memory lent for one backward after the other, each size apart. It may be given back by another thread.

    To take it anew each time would cost as much as to fill it.
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
