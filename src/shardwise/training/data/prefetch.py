"""Batches read before they are asked for, by a thread."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from shardwise.training.data.rows import Batch

_NUM_AHEAD = 3


class Prefetcher:
    """The batches of steps `first` and on, in order. An error while reading is raised where the batch is asked for."""

    def __init__(self, read: Callable[[int], Batch], first: int, last: int) -> None:
        self._read, self._steps = read, iter(range(first, last))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-data")
        self._ahead: deque[Future[Batch]] = deque()
        for _ in range(_NUM_AHEAD):
            self._read_one()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def next(self) -> Batch:
        found = self._ahead.popleft().result()
        self._read_one()
        return found

    def _read_one(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._ahead.append(self._thread.submit(self._read, step))
