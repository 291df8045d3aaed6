"""CUDA graphs of Python functions: what a function launches is captured once, and replayed without the function."""

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
#: What torch says where the host waits for a GPU, if it is asked to.
_WAITS = "synchronizing CUDA operation"
#: And what it says of that once: it does not see all of them. A capture does.
_PROTOTYPE = "Synchronization debug mode is a prototype"


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a function did that was watched. `problems` are in words: each is something that no graph can hold."""

    problems: list[str] = field(default_factory=list)
    #: How long the host was in it, and how long the GPU took from its beginning to its end.
    host_seconds: float = 0.0
    device_seconds: float = 0.0

    @property
    def is_launch_bound(self) -> bool:
        """Whether the host may be what takes long: it was hardly done before the GPU."""
        return self.host_seconds > 0.7 * self.device_seconds


class Graphs(Protocol):
    """What captures functions, and watches them before. `device_type` is that of the devices that it can."""

    device_type: str

    def watched(self) -> AbstractContextManager[Seen]:
        """Around a call of a function that is to be captured."""
        ...

    def capture(self, run: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        """What a function returns, and what replays all that it has launched: what it returned then has new numbers."""
        ...

    def seconds(self, run: Callable[[], None]) -> float:
        """How long the device takes for something that is run now."""
        ...


class CudaGraphs:
    """Those of one GPU. Functions are captured on a stream of their own, and replayed on the current one."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def watched(self) -> Iterator[Seen]:
        """Torch tells where the host waits. What else it warns of goes on to who listens."""
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
        """Nothing is computed yet: that is for the first replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # Threads that read batches ahead pin memory meanwhile, which is not this capture's business.
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
    """Where the generators of the host are."""
    numpy = sys.modules.get("numpy")
    drawn = () if numpy is None else (str(numpy.random.get_state()),)
    return (random.getstate(), torch.get_rng_state().numpy().tobytes(), *drawn)
