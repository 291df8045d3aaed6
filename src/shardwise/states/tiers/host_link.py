"""The way between the host and the devices that weights are streamed to.

On a GPU nothing here waits: copies stand in streams of their own, and what is computed comes after one by an event. A
place of the CPU computes in the user's own thread, which has to wait for what it needs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Event


class Link:
    """Copies to and from one place of a machine."""

    def __init__(self, machine: Machine, place: str) -> None:
        self._machine, self._place = machine, place
        self.device = device_of(place)
        self._on_cpu = self.device.type == "cpu"

    def inward(self, target: Tensor, source: Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy from the host after some marks, and after all that is computed by now: it may still use the memory."""
        after = [self._machine.mark(self._place), *after]
        return self._machine.copy(target, source, to=self._place, of="host", after=after)

    def outward(self, target: Tensor, source: Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy to the host what is computed by now, after some marks. Both tensors have to stay until the mark."""
        after = [self._machine.mark(self._place), *after]
        return self._machine.copy(target, source, to="host", of=self._place, after=after)

    def follow(self, mark: Event) -> None:
        """What is computed from now on comes after a mark."""
        if self._on_cpu:
            mark.wait()
        else:
            self._machine.follow(self._place, mark)


def device_of(place: str) -> torch.device:
    """The device of a place: those of the CPU are all one."""
    return torch.device("cpu" if place.startswith("cpu") else place)
