"""Optimizer-state prefetch that launches one copy at a time.

A GPU completes queued copies of one stream first: if the next copy is always queued, a `loss.item()`, which is a copy
too, waits for all of them, and a step of a Llama-3B took 1.08 s instead of 0.98 s (H200). So two threads, one for each
direction, launch a copy when the previous one is done.

This has a further benefit: the next chunk is chosen when the link is free, not when it was requested. Among chunks
whose gradients are there, the one that the next forward uses first is copied first. So at the end of a backward that
the link lags behind, the first layers overtake those still waiting, and the forward proceeds while the others arrive.

These threads launch the updates too: the owner of the chunks must allow that.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.staging import StagingBuffers
from shardwise.states.tiers.state_prefetch import Item, Owner, R, State, StatePrefetch, Written

#: How often a thread polls whether a copy is done. A chunk takes some 10 ms.
_LOOK_SECONDS = 1e-4


class ThreadedStatePrefetch(StatePrefetch[R]):
    """A prefetch whose copies are launched by separate threads. Their error is in `error`."""

    def __init__(self, owner: Owner[R], chunks: Iterable[R], buffers: StagingBuffers, copies: CopyStreams) -> None:
        super().__init__(owner, chunks, buffers, copies)
        #: Chunks that are LEAVING and whose copy is not launched yet.
        self._leaving: deque[tuple[Item[R], Written]] = deque()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"shardwise-{way}", daemon=True)
            for way, work in (("in", self._come), ("out", self._go))
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        with self.lock:
            left = self._items.values()
            self.lock.wait_for(
                lambda: self._is_over() or not (self._asked or any(each.state is State.LEAVING for each in left))
            )
        super().wait()

    def close(self) -> None:
        self.wait()
        with self.lock:
            self._is_closed = True
            self.lock.notify_all()
        for thread in self._threads:
            thread.join()
        super().close()

    def _advance(self) -> None:
        for item in [each for each in self._asked if each.state is State.STAGED]:
            self._update_guarded(item)
        self.lock.notify_all()

    def _settle(self, items: Iterable[Item[R]]) -> None:
        for item in items:
            self.lock.wait_for(lambda item=item: self._is_over() or item not in self._asked)  # type: ignore[misc]

    def _choose(self, wanted: Sequence[Item[R]]) -> Item[R]:
        # Requests are computed in order, so only the first ones are checked: checking all would delay the link.
        ready = list(takewhile(_is_computed, wanted))
        return min(ready, key=lambda item: item.index) if ready else wanted[0]

    def _send(self, item: Item[R], written: Written) -> None:
        if self._own_memory_of(item, written):
            super()._send(item, written)  # Otherwise all chunks of a first step could wait outside the buffers.
            return
        self._leaving.append((item, written))
        self.lock.notify_all()

    def _is_over(self) -> bool:
        return self._is_closed or self.error is not None

    def _update_guarded(self, item: Item[R]) -> None:
        """Launch an update; its error is raised where it is waited for."""
        try:
            self._update(item)
        except Exception as error:
            self._note(error)
        self.lock.notify_all()

    # The threads.

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        with self.lock:
            self.error = self.error or error
            self.lock.notify_all()

    def _come(self) -> None:
        while True:
            with self.lock:
                while not self._is_over() and (item := self._next()) is None:
                    self.lock.wait()
                if self._is_over():
                    return
                assert item is not None, "the loop has found one"
                self._bring(item)
                arrives = item.arrives
                if item.gradients is not None:
                    self._update_guarded(item)
            self._reach(arrives)
            del item  # While idle, no local variable may keep device memory alive.

    def _go(self) -> None:
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self._leaving or self._is_over())
                if self._is_over():
                    return
                leaving = self._leaving.popleft()
            self._send_home(*leaving)
            del leaving

    def _send_home(self, item: Item[R], written: Written) -> None:
        self._reach(written.events)
        back = [self._copies.to_host_after(host, here) for host, here in written.copies][-1:]
        self._reach(back)
        with self.lock:
            self._at_host(item, gone=())
            self._owner.is_sent(item.chunk, back)
            self.lock.notify_all()

    def _reach(self, events: Iterable[Event]) -> None:
        """Wait for events, except one that an error keeps from being reached."""
        while not all(event.is_done() for event in events) and self.error is None:
            time.sleep(_LOOK_SECONDS)


def _is_computed(item: Item[R]) -> bool:
    """Whether the gradients of one that was asked for are there."""
    if item.gradients and all(event.is_done() for event in item.gradients):
        item.gradients = []
    return not item.gradients
