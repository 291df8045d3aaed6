"""Threads that each keep one core busy.

Torch can spread one operation over all cores, but then they start and end each of the three small ones of an update
together, and the main thread's own team of threads spins beside them: an update of 1e9 numbers took 0.97 s that way (16
cores, 91 GB/s of memory, torch 2.11). A trial of the bare operations, with a thread for each core and pieces of 1e6
numbers, took 0.35 s; what this code takes has not been measured.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from shardwise import environment

#: Cores that are left to those who feed the device.
_LEFT = 2


class Workers:
    """A thread for each core but two, in which operations of torch use no other."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or max(1, environment.num_cores() - _LEFT)
        before = torch.get_num_threads()
        ready = threading.Barrier(self.count + 1)

        def begin() -> None:
            torch.set_num_threads(1)
            ready.wait()

        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="shardwise-update")
        for _ in range(self.count):
            self._pool.submit(begin)
        ready.wait()
        # What a thread sets is its own, and what threads begin with that are started later.
        torch.set_num_threads(before)

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Run all, and return when the last has ended. An error of one is raised."""
        for each in [self._pool.submit(part) for part in parts]:
            each.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
