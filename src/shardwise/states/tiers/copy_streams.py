"""Copies between a device and its host, beside the computation and in both directions at once.

On a GPU nothing here waits: copies run in separate streams, and computation is ordered after a copy by an event. On the
CPU, host and device are the same memory; there a thread makes the copy, and its user waits for it. So offloading runs
on a laptop with the same separate memory and the same moves as on a GPU.

    call              copies or runs            after
    to_device         host -> device            the given events
    to_host           device -> host            the given events and all that is computed by now
    to_host_after     device -> host            the given events
    run_after         in a stream of its own    the given events
    follow            what is computed next     the given event

This module does not track the users of memory. So both tensors of a copy must stay alive until its event is reached,
and newly allocated memory must be written after `computed()`: until then earlier work may still use it.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.dataflow.cuda import CudaStream, new_stream
from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Event


def device_of(place: str) -> torch.device:
    """Return the device of a machine's place: all places on the CPU are one device."""
    return torch.device("cpu" if place.startswith("cpu") else place)


class CopyStreams:
    """The copies of one device, on its own machine unless one is given, with the name of the device there."""

    def __init__(self, device: torch.device, machine: Machine | None = None, place: str | None = None) -> None:
        self.device = device
        # The device of an existing tensor has an index, except for the CPU.
        self._place = place or ("cpu:0" if device.type == "cpu" else str(device))
        self._is_own = machine is None
        self._machine = machine or Machine([self._place])
        self._lock = threading.Lock()  # A machine must be used by one thread at a time.
        self._side: CudaStream | None = None

    @property
    def _on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory, pinned if there is a GPU."""
        return self._machine.pinned(shape, dtype)

    def to_device(self, device: Tensor, host: Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy from the host, after some events."""
        # Places on the CPU are not told apart by a tensor's device, so they are named.
        places = {"to": self._place, "of": "host"} if self._on_cpu else {}
        with self._lock:
            return self._machine.copy(device.view(-1), host.view(-1), after=after, **places)

    def to_host(self, host: Tensor, device: Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy to the host, after some events and all that is computed by now."""
        return self.to_host_after(host, device, [*self.computed(), *after])

    def to_host_after(self, host: Tensor, device: Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy to the host, after these events only. On the CPU, all earlier computation is already done."""
        places = {"to": "host", "of": self._place} if self._on_cpu else {}
        with self._lock:
            return self._machine.copy(host.view(-1), device.view(-1), after=after, **places)

    def computed(self) -> list[Event]:
        """Return events after all computation launched so far; on the CPU it is already done."""
        if self._on_cpu:
            return []
        with self._lock:
            return [self._machine.mark(self._place)]

    def run_after(self, run: Callable[[], object], after: Sequence[Event]) -> list[Event]:
        """Run a computation after these events only, independently of other computation; return events after it.

        Everything that it reads has to stay alive until then. The CPU computes at once.
        """
        if self._on_cpu:
            for event in after:
                event.wait()
            run()
            return []
        with self._lock:
            if self._side is None:
                self._side = CudaStream(f"{self.device} update", new_stream(self.device), self._machine.failures)
        return [self._side.put(run, after, lambda error: error)]

    def follow(self, event: Event) -> None:
        """Order later computation after an event. On the CPU the caller waits."""
        if self._on_cpu:
            event.wait()
            return
        with self._lock:
            self._machine.follow(self._place, event)

    def close(self) -> None:
        """Wait for copies in progress, and end the threads."""
        if self._side is not None:
            self._side.close()
        if self._is_own:
            self._machine.close()
