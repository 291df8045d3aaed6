"""Batches read before they are asked for, by a thread."""

import queue
import threading
from collections.abc import Callable
from types import TracebackType

from shardwise.training.data.rows import Batch

_NUM_AHEAD = 2


class Prefetcher:
    """The batches of steps `first` and on, in order. An error while reading is raised where the batch is asked for."""

    def __init__(self, read: Callable[[int], Batch], first: int, last: int) -> None:
        self._read, self._next, self._last = read, first, last
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(_NUM_AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shardwise-data", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, story: TracebackType | None
    ) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            # The thread may be waiting for room.
            with self._ready.mutex:
                self._ready.queue.clear()
                self._ready.not_full.notify_all()
            self._thread.join(0.01)

    def next(self) -> Batch:
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _work(self) -> None:
        for step in range(self._next, self._last):
            if self._stopped.is_set():
                return
            try:
                self._ready.put(self._read(step))
            except BaseException as error:
                self._ready.put(error)
                return
