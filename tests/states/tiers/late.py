"""Copies that happen as late as they may, in an order that a die chooses: what forgets to wait for one is found.

Each way is a queue, as on a GPU. What computes does so at once; a copy runs when somebody waits for it or for one
behind it, and now and then by itself.
"""

import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import CopyStreams


class LateEvent(Event):
    """Reached when its copy has run."""

    def __init__(self, copies: "LateCopyStreams") -> None:
        self._copies = copies
        self.is_reached = False

    def wait(self) -> None:
        self._copies.run_until(self)

    def is_done(self) -> bool:
        self._copies.run_some()
        return self.is_reached


class _Copy(NamedTuple):
    event: LateEvent
    after: list[LateEvent]
    target: Tensor
    source: Tensor


class LateCopyStreams(CopyStreams):
    """A way to the host on which nothing is in a hurry."""

    def __init__(self, seed: int) -> None:
        self.device, self._side = torch.device("cpu"), None
        self._die = random.Random(seed)
        self._ways: tuple[deque[_Copy], deque[_Copy]] = (deque(), deque())

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        found = torch.empty(tuple(shape), dtype=dtype)
        found.view(-1).view(torch.uint8).fill_(255)  # NaN: what is read too early is seen.
        return found

    def to_device(self, here: Tensor, home: Tensor, after: Sequence[Event] = ()) -> Event:
        return self._put(0, here, home, after)

    def to_host_after(self, home: Tensor, here: Tensor, after: Sequence[Event] = ()) -> Event:
        return self._put(1, home, here, after)

    def computed(self) -> list[Event]:
        return []

    def follow(self, event: Event) -> None:
        event.wait()

    def close(self) -> None:
        while self._run_one():
            pass

    def run_until(self, event: LateEvent) -> None:
        while not event.is_reached:
            assert self._run_one(), "a copy waits for what is never copied"

    def run_some(self) -> None:
        while self._die.random() < 0.3 and self._run_one():
            pass

    def _put(self, way: int, target: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        event = LateEvent(self)
        self._ways[way].append(_Copy(event, cast(list[LateEvent], list(after)), target.view(-1), source.view(-1)))
        self.run_some()
        return event

    def _run_one(self) -> bool:
        ready = [way for way in self._ways if way and all(each.is_reached for each in way[0].after)]
        if not ready:
            return False
        event, _, target, source = self._die.choice(ready).popleft()
        target.copy_(source)
        event.is_reached = True
        return True
