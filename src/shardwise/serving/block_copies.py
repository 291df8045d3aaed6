"""Copies between the blocks of a cache and places on the host. On a GPU they run concurrently with its steps:

    out         cache to host, after the step that wrote the block
    in          host to cache, at the same time: a link carries both directions at once
    computing   steps; a step waits for blocks that come in, and for blocks it may overwrite to have gone out

| operation | waits for |
|---|---|
| copy out of a block | the steps begun so far; the last copy of the place |
| copy into a block | the steps begun so far; the last copy of the place; the block's own copy out |
| the next step (`fence`) | all copies in; the copy out of each block that was let go (`let_go`) |

A block that is copied out ahead of time and stays in the cache delays nothing. Starting a copy, with its stream and its
event, takes the host longer than the link takes for one block. So copies out are batched (`begin`), and copies in share
one event per call. On a CPU a copy is synchronous.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.serving.host_places import HostPlaces

#: Blocks that are copied out behind one event. A copy into any of them waits for all.
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _Lot:
    """A batch of copies that were begun, and its number in the order of beginning."""

    number: int
    event: Any


def _begin_copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


class BlockCopies:
    """Copies of the cache `data`, [blocks, bytes]. `cuda` and `copy` are replaced in tests."""

    def __init__(self, data: Tensor, *, cuda: Any = None, copy: Callable[[Tensor, Tensor], None] = _begin_copy) -> None:
        self._blocks, self._device, self._copy = data.unbind(), data.device, copy
        self._cuda = torch.cuda if data.is_cuda else cuda
        #: Whether copies run concurrently with steps.
        self.are_beside = self._cuda is not None
        #: Copies out that have not begun, oldest first; their blocks; and whether one of these blocks was let go.
        self._to_leave: list[tuple[int, HostPlaces, int]] = []
        self._are_to_leave: set[int] = set()
        self._awaits_one = False
        #: Blocks being copied out, oldest first.
        self._leaving: dict[int, _Lot] = {}
        #: What the next step waits for: the last batch of each direction. Batches of one direction end in order.
        self._awaited_in: _Lot | None = None
        self._awaited_out: _Lot | None = None
        self._num_begun = 0
        #: Whether both copy streams already wait for the steps begun so far.
        self._is_behind = False
        if self.are_beside:
            self._out, self._in = self._cuda.Stream(self._device), self._cuda.Stream(self._device)

    def out(self, block: int, places: HostPlaces, place: int) -> None:
        """Copy a block to a place: at once on a CPU, otherwise with others at the next `begin`, `bring` or `fence`."""
        if self.are_beside:
            self._to_leave.append((block, places, place))
            self._are_to_leave.add(block)
        else:
            self._copy(places.views[place], self._blocks[block])

    def begin(self) -> None:
        """Begin all pending copies out: from here on their places have events."""
        going, self._to_leave = self._to_leave, []
        self._are_to_leave.clear()
        for first in range(0, len(going), _AT_ONCE):
            some = going[first : first + _AT_ONCE]
            self._come_behind()
            self._wait(self._out, [places.last.get(place) for _, places, place in some])
            lot = self._run(self._out, [(places.views[place], self._blocks[block]) for block, places, place in some])
            for block, places, place in some:
                self._leaving.pop(block, None)
                self._leaving[block], places.last[place] = lot, lot.event
            if self._awaits_one:
                self._awaited_out = lot
        self._awaits_one = False

    def let_go(self, block: int) -> None:
        """Make the next step, which may overwrite this block, wait until the block has been copied out."""
        if block in self._are_to_leave:
            self._awaits_one = True
            return
        lot = self._leaving.get(block)
        if lot is not None and (self._awaited_out is None or lot.number > self._awaited_out.number):
            self._awaited_out = lot

    def bring(self, wanted: Sequence[tuple[HostPlaces, int, int]]) -> None:
        """Copy from host places into blocks of the cache."""
        pairs = [(self._blocks[block], places.views[place]) for places, place, block in wanted]
        if not self.are_beside:
            for target, source in pairs:
                self._copy(target, source)
            return
        self.begin()
        self._come_behind()
        leaving = [self._leaving.get(block) for _, _, block in wanted]
        self._wait(self._in, [places.last.get(place) for places, place, _ in wanted])
        self._wait(self._in, [None if lot is None else lot.event for lot in leaving])
        self._awaited_in = self._run(self._in, pairs)
        for places, place, _ in wanted:
            places.last[place] = self._awaited_in.event

    def fence(self) -> None:
        """Order the next step behind the copies in, and behind the copies out of blocks that were let go."""
        if not self.are_beside:
            return
        self.begin()
        computing = self._cuda.current_stream(self._device)
        self._wait(computing, [None if lot is None else lot.event for lot in (self._awaited_in, self._awaited_out)])
        self._awaited_in = self._awaited_out = None
        over: _Lot | None = None
        for block, lot in list(self._leaving.items()):
            if lot is not over and not lot.event.query():
                break
            over = lot
            del self._leaving[block]
        self._is_behind = False

    def settle(self) -> None:
        """Block the host until all copies are done."""
        if self.are_beside:
            self.begin()
            self._out.synchronize()
            self._in.synchronize()

    def block_seconds(self, places: HostPlaces) -> float:
        """Return the seconds of one block's copy to a GPU. Call it before the cache is in use: it overwrites blocks."""
        count = min(32, len(places), len(self._blocks))
        if not self.are_beside or not count:
            return 0.0
        begun, over = (self._cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # The first round is slower.
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

    def _run(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> _Lot:
        with self._cuda.stream(stream):
            for target, source in pairs:
                self._copy(target, source)
            event = self._cuda.Event()
            event.record()
        self._num_begun += 1
        return _Lot(self._num_begun, event)

    def _wait(self, stream: Any, events: Iterable[Any]) -> None:
        for event in {id(each): each for each in events if each is not None}.values():
            if not event.query():
                stream.wait_event(event)
