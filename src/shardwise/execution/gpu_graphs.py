"""CUDA graphs of Python functions: capture the launches of a function once, and replay them without the function."""

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch

_T = TypeVar("_T")
#: Part of torch's warning about a host synchronization in sync debug mode.
_WAITS = "synchronizing CUDA operation"
#: Torch's one-time warning that this mode may miss some synchronizations. A capture misses none.
_PROTOTYPE = "Synchronization debug mode is a prototype"


@dataclass(slots=True, kw_only=True)
class Seen:
    """Observations of a watched function. `problems` are sentences: each names a thing a CUDA graph cannot capture."""

    problems: list[str] = field(default_factory=list)
    #: Time that the host spent in the function, and that the GPU took from its first to its last operation.
    host_seconds: float = 0.0
    device_seconds: float = 0.0

    @property
    def is_launch_bound(self) -> bool:
        """Whether the host may be the bottleneck: it finished hardly before the GPU."""
        return self.host_seconds > 0.7 * self.device_seconds


class Graphs(Protocol):
    """Captures functions, and watches them beforehand. `device_type` is the type of device that it supports."""

    device_type: str

    def watched(self) -> AbstractContextManager[Seen]:
        """Return a context for a call of a function that is to be captured later."""
        ...

    def capture(self, run: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        """Return a function's result, and a function that replays its launches, which updates that result in place."""
        ...

    def seconds(self, run: Callable[[], None]) -> float:
        """Run a function, and return the seconds that the device takes for it."""
        ...


class CudaGraphs:
    """CUDA graphs of one GPU. Functions are captured on a separate stream, and replayed on the current one."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def watched(self) -> Iterator[Seen]:
        """Watch a call in torch's sync debug mode. Warnings about anything else are issued again."""
        seen, mode, drawn = Seen(), torch.cuda.get_sync_debug_mode(), _host_draws()
        torch.cuda.synchronize(self._device)
        begin, end = _event(), _event()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            begin.record()
            begun = perf_counter()
            try:
                yield seen
            finally:
                seen.host_seconds = perf_counter() - begun
                end.record()
                torch.cuda.set_sync_debug_mode(mode)
        for each in told:
            if _WAITS in str(each.message):
                seen.problems.append(f"the host waits for the GPU at {Path(each.filename).name}:{each.lineno}")
            elif _PROTOTYPE not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if _host_draws() != drawn:
            seen.problems.append("it draws random numbers on the host")
        end.synchronize()
        seen.device_seconds = begin.elapsed_time(end) / 1e3

    def capture(self, run: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        """Capture a function. Nothing is computed until the first replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # Thread-local: prefetching threads may pin memory meanwhile, which must not break this capture.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                made = run()
        return made, graph.replay

    def seconds(self, run: Callable[[], None]) -> float:
        torch.cuda.synchronize(self._device)
        begin, end = _event(), _event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_draws() -> tuple[Any, ...]:
    """Return the states of the host's random number generators."""
    numpy = sys.modules.get("numpy")
    drawn = () if numpy is None else (str(numpy.random.get_state()),)
    return (random.getstate(), torch.get_rng_state().numpy().tobytes(), *drawn)
