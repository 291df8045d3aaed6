"""Copies between the blocks of a cache and places on the host. On a GPU they run beside its steps:

    out         cache to host, behind the step that wrote the block
    in          host to cache, at the same time: a link carries both ways at once
    computing   steps; a step waits for what came in, and for the blocks that it may write over to have gone out

| what comes | waits for |
|---|---|
| out of a block | the steps begun so far; the last copy of the place |
| in to a block | the steps begun so far; the last copy of the place; the block's own way out |
| the next step (`fence`) | all that came in; the way out of each block that was let go (`let_go`) |

A block that goes out ahead of time, and stays in the cache meanwhile, holds up nobody. On a CPU a copy is made at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from shardwise.serving.host_places import HostPlaces


@dataclass(frozen=True, slots=True)
class _Copy:
    """One that was begun, and the how manieth it is."""

    number: int
    event: Any


def _begin_copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


class BlockCopies:
    """Of the cache `data`, [blocks, bytes]. `cuda` and `copy` are given by tests."""

    def __init__(self, data: Tensor, *, cuda: Any = None, copy: Callable[[Tensor, Tensor], None] = _begin_copy) -> None:
        self._blocks, self._device, self._copy = data.unbind(), data.device, copy
        self._cuda = torch.cuda if data.is_cuda else cuda
        #: Whether copies run beside steps.
        self.are_beside = self._cuda is not None
        #: Events of blocks on their way out, the oldest first.
        self._leaving: dict[int, _Copy] = {}
        #: What the next step waits for: of each way the last. Copies of one way end in their order.
        self._awaited_in: _Copy | None = None
        self._awaited_out: _Copy | None = None
        self._num_begun = 0
        #: Whether both streams are behind the steps begun so far.
        self._is_behind = False
        if self.are_beside:
            self._out, self._in = self._cuda.Stream(self._device), self._cuda.Stream(self._device)

    def out(self, block: int, places: HostPlaces, place: int) -> None:
        if not self.are_beside:
            self._copy(places.views[place], self._blocks[block])
            return
        self._come_behind()
        self._wait(self._out, places.last.get(place))
        self._leaving.pop(block, None)
        copy = self._leaving[block] = self._run(self._out, places.views[place], self._blocks[block])
        places.last[place] = copy.event

    def let_go(self, block: int) -> None:
        """Whoever writes to this block next waits until it has gone out."""
        copy = self._leaving.get(block)
        if copy is not None and (self._awaited_out is None or copy.number > self._awaited_out.number):
            self._awaited_out = copy

    def bring(self, places: HostPlaces, place: int, block: int) -> None:
        if not self.are_beside:
            self._copy(self._blocks[block], places.views[place])
            return
        self._come_behind()
        self._wait(self._in, places.last.get(place))
        leaving = self._leaving.get(block)
        self._wait(self._in, None if leaving is None else leaving.event)
        self._awaited_in = self._run(self._in, self._blocks[block], places.views[place])
        places.last[place] = self._awaited_in.event

    def fence(self) -> None:
        """A step comes: it may read what was brought, and write to what was let go."""
        if not self.are_beside:
            return
        computing = self._cuda.current_stream(self._device)
        for copy in (self._awaited_in, self._awaited_out):
            self._wait(computing, None if copy is None else copy.event)
        self._awaited_in = self._awaited_out = None
        for block in [*takewhile(lambda block: self._leaving[block].event.query(), self._leaving)]:
            del self._leaving[block]
        self._is_behind = False

    def settle(self) -> None:
        """Wait here for all copies."""
        if self.are_beside:
            self._out.synchronize()
            self._in.synchronize()

    def block_seconds(self, places: HostPlaces) -> float:
        """Of one block on its way to a GPU's cache, which nobody uses yet."""
        count = min(32, len(places), len(self._blocks))
        if not self.are_beside or not count:
            return 0.0
        begun, over = (self._cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # The first is slower.
            begun.record()
            for block in range(count):
                self._copy(self._blocks[block], places.views[block])
            over.record()
        over.synchronize()
        return float(begun.elapsed_time(over)) / 1e3 / count

    def _come_behind(self) -> None:
        if not self._is_behind:
            computing = self._cuda.current_stream(self._device)
            self._out.wait_stream(computing)
            self._in.wait_stream(computing)
            self._is_behind = True

    def _run(self, stream: Any, target: Tensor, source: Tensor) -> "_Copy":
        with self._cuda.stream(stream):
            self._copy(target, source)
            event = self._cuda.Event(blocking=True)  # A thread that waits for it sleeps.
            event.record()
        self._num_begun += 1
        return _Copy(self._num_begun, event)

    def _wait(self, stream: Any, event: Any) -> None:
        if event is not None and not event.query():
            stream.wait_event(event)
