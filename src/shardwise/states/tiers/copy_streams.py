"""The way between a rank's device and its host: copies beside the computation, in both directions at once.

On a GPU nothing here waits: copies stand in streams of their own, and what is computed comes after one by an event. On
the CPU the host is the same memory; there a copy is made by a thread, and whoever needs it waits for it. So what a plan
puts on the host is kept apart and moved on a laptop as it is beside a GPU.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.dataflow.cuda import CudaStream, new_stream
from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Event


class Crossing:
    """Copies of one device, on a machine of its own unless one is given, with the name of the device there."""

    def __init__(self, device: torch.device, machine: Machine | None = None, place: str | None = None) -> None:
        self.device = device
        self._on_gpu = device.type != "cpu"
        # The device of a tensor that is there has its number, but for the CPU.
        self._place = place or (str(device) if self._on_gpu else "cpu:0")
        self._is_own = machine is None
        self._machine = machine or Machine([self._place])
        self._lock = threading.Lock()  # A machine is one thread's at a time.
        self._side: CudaStream | None = None
        if self._on_gpu:
            self._side = CudaStream(f"{device} update", new_stream(device), self._machine.failures)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host, pinned where there is a GPU."""
        return self._machine.pinned(shape, dtype)

    def inward(self, here: Tensor, home: Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy from the host, after some marks. Both tensors have to stay until the mark is reached."""
        with self._lock:
            if self._on_gpu:
                return self._machine.copy(here.view(-1), home.view(-1), after=after)
            return self._machine.copy(here.view(-1), home.view(-1), to=self._place, of="host", after=after)

    def outward(self, home: Tensor, here: Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy to the host, after some marks and all that is computed by now."""
        return self.homeward(home, here, [*self.computed(), *after])

    def homeward(self, home: Tensor, here: Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy to the host, after some marks and nothing else. The CPU has computed what it was told to."""
        with self._lock:
            if self._on_gpu:
                return self._machine.copy(home.view(-1), here.view(-1), after=after)
            return self._machine.copy(home.view(-1), here.view(-1), to="host", of=self._place, after=after)

    def computed(self) -> list[Event]:
        """Marks behind all that is computed by now; the CPU has computed what it was told to."""
        if not self._on_gpu:
            return []
        with self._lock:
            return [self._machine.mark(self._place)]

    def beside(self, run: Callable[[], object], after: Sequence[Event]) -> list[Event]:
        """Compute after some marks and all that is computed by now, but beside what comes next; marks behind it.

        Whatever it reads has to stay until then. The CPU computes at once.
        """
        return self.apart(run, [*self.computed(), *after])

    def apart(self, run: Callable[[], object], after: Sequence[Event]) -> list[Event]:
        """Compute after some marks and nothing else that is put to compute; marks behind it."""
        if self._side is not None:
            return [self._side.put(run, after, lambda error: error)]
        for mark in after:
            mark.wait()
        run()
        return []

    def follow(self, mark: Event) -> None:
        """What is computed from now on comes after a mark."""
        if self._on_gpu:
            with self._lock:
                self._machine.follow(self._place, mark)
        else:
            mark.wait()

    def close(self) -> None:
        """Wait for what is under way, and end its threads."""
        if self._side is not None:
            self._side.close()
        if self._is_own:
            self._machine.close()
