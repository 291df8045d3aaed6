"""When a GPU has done what it was given, by the host's clock.

A host hands over kernels and goes on; how long that took says nothing of how long they take. So a mark is put into the
stream behind every instruction, and the times of the marks are asked for when the step has ended. Kernels of a stream
run one after the other: an instruction began when it was handed over, or when what was before it had ended.
"""

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor


class Clock(Protocol):
    """What puts marks, and knows their times afterwards."""

    def mark(self) -> Any: ...

    def times(self, marks: Sequence[Any]) -> list[float]: ...


class DeviceClock:
    """The current stream of a GPU. It is made when nothing is under way there."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._device, self._host = device, perf_counter()
        self._begin = self.mark()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return event

    def times(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Seconds by the host's clock. Waits until all of them have come."""
        torch.cuda.synchronize(self._device)
        return [self._host + self._begin.elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(tensors: Iterable[Tensor]) -> Clock | None:
    """The clock of the GPU that tensors are on; None where the host computes itself."""
    device = next((each.device for each in tensors), None)
    return DeviceClock(device) if device is not None and device.type == "cuda" else None
