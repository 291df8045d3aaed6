"""A GPU that is played late: what it is told runs only when somebody waits, in an order chosen by a die.

It does what `played.py` does not: its streams run behind the host and beside each other, a capture takes work down
without running it, events of a capture mean nothing outside of it, and its streams come from a small pool.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.dataflow import buffers, choice, cuda, graphs, mover, place
from shardwise.dataflow.cuda import CudaStream
from shardwise.dataflow.streams import Event, Run

_POOL = 4  # Torch has 32 streams, and then gives out the first again. With four that happens soon.


class Reached:
    """Whether a stream has come to where an event was recorded."""

    is_so = False


class LateGraph:
    """Work with what each piece of it comes after, by number."""

    def __init__(self, gpu: "LateGpu") -> None:
        self.gpu = gpu
        self.nodes: list[tuple[Run, frozenset[int]]] = []

    def replay(self) -> None:
        """Run all of it, in any order that its edges allow."""
        left, done = set(range(len(self.nodes))), set[int]()
        while left:
            number = self.gpu.die.choice(sorted(each for each in left if self.nodes[each][1] <= done))
            self.nodes[number][0]()
            left.remove(number)
            done.add(number)


class LateStream:
    """A queue of work, of events to be reached and of events to wait for."""

    device_index = 0

    def __init__(self, gpu: "LateGpu", number: int) -> None:
        self.gpu, self.cuda_stream = gpu, number
        self.queue: deque[tuple[Reached | None, Run | None]] = deque()
        self.graph: LateGraph | None = None  # While it is captured.
        self.tail: frozenset[int] = frozenset()

    def wait_event(self, event: "LateEvent") -> None:
        with self.gpu.lock:
            if event.graph is not None:
                assert event.graph in self.gpu.captures, "an event of a capture that is over"
                self.graph = event.graph
                self.tail |= event.tail
            elif self.graph is not None:
                raise RuntimeError("a capture depends on work outside of it")
            elif event.reached is not None:
                self.queue.append((event.reached, None))

    def wait_stream(self, other: "LateStream") -> None:
        event = LateEvent(self.gpu)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.queue)


class LateEvent:
    """Recorded in a stream, or in a capture."""

    def __init__(self, gpu: "LateGpu") -> None:
        self.gpu = gpu
        self.reached: Reached | None = None
        self.graph: LateGraph | None = None
        self.tail: frozenset[int] = frozenset()

    def record(self, stream: LateStream | None = None) -> None:
        with self.gpu.lock:
            if stream is None:
                return
            self.graph, self.tail = stream.graph, stream.tail
            if stream.graph is None:
                reached = self.reached = Reached()
                stream.queue.append((None, partial(setattr, reached, "is_so", True)))

    def query(self) -> bool:
        self._refuse_captured()
        return self.reached is None or self.reached.is_so

    def synchronize(self) -> None:
        self._refuse_captured()
        reached = self.reached
        if reached is not None:
            self.gpu.run_until(lambda: reached.is_so)

    def elapsed_time(self, end: "LateEvent") -> float:  # noqa: ARG002
        return 1.0

    def _refuse_captured(self) -> None:
        if self.graph is not None:
            raise RuntimeError("an event of a capture is asked for")


class LateGpu:
    """One GPU, its streams, and which of them is each thread's current one."""

    def __init__(self, seed: int) -> None:
        self.die = random.Random(seed)
        self.lock = threading.RLock()
        self.captures: list[LateGraph] = []
        self.num_captured: list[int] = []  # Pieces of work in each graph.
        self.num_launched = 0  # Kernels launched without having been put.
        self.num_relaunched = 0  # Graphs likewise.
        self.default = LateStream(self, 0)
        self.pool = [LateStream(self, number + 1) for number in range(_POOL)]
        self.pinned: set[int] = set()
        self._num_asked = 0
        self._current = threading.local()

    @property
    def current(self) -> LateStream:
        """The calling thread's stream."""
        found: LateStream = getattr(self._current, "stream", self.default)
        return found

    def new_stream(self, device: object = None) -> LateStream:  # noqa: ARG002
        self._num_asked += 1
        return self.pool[self._num_asked % _POOL]

    def enqueue(self, run: Run) -> None:
        """What a launch does: note the work in the current stream, or in the capture it is part of."""
        with self.lock:
            stream = self.current
            if stream.graph is None:
                stream.queue.append((None, run))
            else:
                stream.graph.nodes.append((run, stream.tail))
                stream.tail = frozenset({len(stream.graph.nodes) - 1})

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Run what is first in some stream, again and again."""
        with self.lock:
            while not is_over():
                ready = [each for each in (self.default, *self.pool) if each.queue and _is_ready(each.queue[0])]
                assert ready, "streams wait for each other"
                run = self.die.choice(ready).queue.popleft()[1]
                if run is not None:
                    run()

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before = self.current
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    @contextmanager
    def capture(self, graph: LateGraph, *, stream: LateStream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads would break the capture"
        self.run_until(lambda: not any(each.queue for each in (self.default, *self.pool)))
        self.captures.append(graph)
        stream.graph, stream.tail = graph, frozenset()
        try:
            with self.stream(stream):
                yield
            with self.lock:
                behind, left = set[int](), list(stream.tail)
                while left:
                    number = left.pop()
                    behind.add(number)
                    left += graph.nodes[number][1]
                if len(behind) < len(graph.nodes):
                    raise RuntimeError("a capture ends with work that was not joined")
                self.num_captured.append(len(graph.nodes))
        finally:
            with self.lock:
                self.captures.remove(graph)
                for each in self.pool:
                    if each.graph is graph:
                        each.graph, each.tail = None, frozenset()

    def memory(self) -> tuple[buffers.Allocate, buffers.Free]:
        """Memory that a graph can hold copies of: the GPU's own, and pinned memory of the host."""

        def allocate(num_bytes: int) -> Tensor:
            storage = torch.empty(num_bytes, dtype=torch.uint8)
            self.pinned.add(storage.untyped_storage().data_ptr())
            return storage

        def free(storage: Tensor) -> None:
            self.pinned.discard(storage.untyped_storage().data_ptr())
            storage.fill_(0x5A)  # Somebody else's now: whoever still needs it finds rubbish.

        return allocate, free


def play_late(monkeypatch: pytest.MonkeyPatch, seed: int) -> LateGpu:
    """Have one GPU, `cuda:0`, that is always behind."""
    gpu = LateGpu(seed)
    issue, launch, relaunch = CudaStream._issue, CudaStream.launch, CudaStream.relaunch
    plain = buffers.device_memory(torch.device("cpu"))

    def issue_late(
        stream: CudaStream, event: Event, run: Any, after: Sequence[Event], args: Any = (), options: Any = None
    ) -> None:
        issue(stream, event, partial(gpu.enqueue, partial(run, *args, **(options or {}))), after)

    def launch_late(stream: CudaStream, *args: Any) -> Event:
        gpu.num_launched += 1
        return launch(stream, *args)

    def relaunch_late(stream: CudaStream, replay: Run, event: Event) -> None:
        gpu.num_relaunched += 1
        relaunch(stream, partial(gpu.enqueue, replay), event)

    def is_pinned(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in gpu.pinned

    replaced: list[tuple[Any, str, Any]] = [
        (CudaStream, "_issue", issue_late),
        (CudaStream, "launch", launch_late),
        (CudaStream, "relaunch", relaunch_late),
        (Tensor, "is_pinned", is_pinned),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_stream", lambda _: gpu.current),
        (torch.cuda, "stream", gpu.stream),
        (torch.cuda, "device", lambda _: nullcontext()),
        (torch.cuda, "graph", gpu.capture),
        (torch.cuda, "CUDAGraph", lambda: LateGraph(gpu)),
        (cuda, "raw_stream", lambda _: gpu.current.cuda_stream),
        (place, "device_memory", lambda device: gpu.memory() if device.type == "cuda" else plain),
        (place, "host_memory", lambda is_pinned: gpu.memory()),  # noqa: ARG005
        *((module, "new_event", lambda times=False: LateEvent(gpu)) for module in (cuda, choice)),  # noqa: ARG005
        *((module, "new_stream", gpu.new_stream) for module in (place, mover, graphs)),
    ]
    for owner, name, value in replaced:
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(cuda, "current_gpu", lambda: 0)
    return gpu


def _is_ready(item: tuple[Reached | None, Run | None]) -> bool:
    return item[0] is None or item[0].is_so
