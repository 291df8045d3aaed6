"""Streams of a GPU. They wait on CUDA events, so the thread that submits work never blocks.

A GPU cannot wait for a host thread, such as one that runs a host function or reads a disk. Work that depends on a
thread is therefore handed to an issuing thread of its stream, which issues it once the dependency is met. Later work of
the same stream goes through that thread too, and so does work of other streams that depends on it. In the usual case no
thread is involved and the caller issues directly.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from shardwise.dataflow.streams import Blame, Event, Failures, Run, ThreadStream
from shardwise.torch_private import current_gpu, raw_stream

_LOOK_SECONDS = 0.05
_NO_OPTIONS: dict[str, Any] = {}


class CudaEvent(Event):
    """An event over a CUDA event, which is recycled once this object is unreachable: creating one is slow.

    Recycling is safe: a stream that already waits on a CUDA event waits for what had been recorded at that time,
    whatever is recorded in it later.
    """

    def __init__(self, stream: "CudaStream", number: int) -> None:
        self.stream = stream
        self.number = number
        self._spare = stream.spare

    def __del__(self) -> None:
        if self.cuda_event is not None and self._spare is not None:
            self._spare.append(self.cuda_event)


class CudaStream:
    """A stream of one GPU."""

    def __init__(self, name: str, stream: torch.cuda.Stream, failures: Failures, *, times: bool = False) -> None:
        self.name = name
        self.tail_seconds = 0.0
        self.last: Event | None = None
        self._times = times
        # CUDA events to recycle. Timing events are not recycled, as they are read later; nor are those of a capture.
        self.spare: list[Any] | None = None if times else []
        self._failures = failures
        self._num_put = 0
        self._behind = ThreadStream(f"{name} issue", failures)
        self._num_behind = 0
        self._issued = threading.Condition()
        self.turn_to(stream)

    def turn_to(self, stream: torch.cuda.Stream) -> None:
        """Switch to another CUDA stream of the GPU, as a capture does."""
        self.cuda = stream
        self._raw: int = stream.cuda_stream
        self.device_index: int = stream.device_index

    def put(self, run: Run, after: Sequence[Event], blame: Blame, *, is_captured: bool = False) -> Event:
        self._num_put += 1
        event = CudaEvent(self, self._num_put)
        # During a capture the caller always issues: work issued later by a thread would run instead of being captured.
        if is_captured or self.can_issue(after):
            try:
                self._issue(event, run, after)
            except Exception as error:
                raise blame(error) from error
        else:
            with self._issued:
                self._num_behind += 1
            self._behind.put(partial(self._issue_behind, event, run, after), (), blame)
        self.last = event
        return event

    def can_issue(self, after: Sequence[Event]) -> bool:
        """Whether the caller may issue directly, because no thread has to be waited for."""
        # Only the issuing thread decrements `_num_behind`, after the event is recorded: 0 means that all is issued.
        return self._num_behind == 0 and (not after or all(_can_follow(each) for each in after))

    def launch(
        self, run: Any, tensors: Sequence[Any], options: dict[str, Any], grid: Any, after: Sequence[Event]
    ) -> Event:
        """Issue a kernel directly, where `can_issue` allows it: like `put`, without a closure to run later."""
        self._num_put += 1
        event = CudaEvent(self, self._num_put)
        self._issue(event, run, after, tensors, {"grid": grid, "warmup": False, **options})
        self.last = event
        return event

    def is_current(self) -> bool:
        """Whether this is the current stream of its GPU in the calling thread."""
        return bool(raw_stream(self.device_index) == self._raw)

    def relaunch(self, replay: Run, event: Event) -> None:
        """Replay a graph while this is the current stream, and record the stream's last event again behind it.

        Streams that already wait on the CUDA event still wait for what was recorded before.
        """
        replay()
        cast(Any, event.cuda_event).record(self.cuda)
        self._num_put += 1
        event.number = self._num_put
        self.last = event

    def is_done(self, event: Event) -> bool:
        return event.cuda_event is not None and bool(cast(Any, event.cuda_event).query())

    def wait(self, event: Event) -> None:
        self.wait_issued(event)
        if event.cuda_event is not None:
            cast(Any, event.cuda_event).synchronize()

    def wait_issued(self, event: Event) -> None:
        # After a failure, work of the issuing thread is never issued and nothing may notify us: hence the timeout.
        while event.cuda_event is None and self._failures.first is None:
            with self._issued:
                if event.cuda_event is None:  # Otherwise the notification came before we held the lock.
                    self._issued.wait(timeout=_LOOK_SECONDS)

    def close(self) -> None:
        self._behind.close()
        self.cuda.synchronize()

    def _issue_behind(self, event: Event, run: Run, after: Sequence[Event]) -> None:
        try:
            for other in after:
                other.stream.wait_issued(other)
            if self._failures.first is None:
                self._issue(event, run, after)
        finally:
            with self._issued:
                self._num_behind -= 1
                self._issued.notify_all()

    def _issue(
        self,
        event: Event,
        run: Callable[..., object],
        after: Sequence[Event],
        args: Sequence[Any] = (),
        options: Mapping[str, Any] = _NO_OPTIONS,
    ) -> None:
        for other in after:
            if other.stream is not self and other.cuda_event is not None:
                self.cuda.wait_event(cast(torch.cuda.Event, other.cuda_event))
        cuda_event = self.spare.pop() if self.spare else new_event(times=self._times)
        # Entering a stream context is slower than checking which stream is current, and usually it is this one.
        if current_gpu() == self.device_index and raw_stream(self.device_index) == self._raw:
            run(*args, **options)
        else:
            with torch.cuda.stream(self.cuda):
                run(*args, **options)
        cuda_event.record(self.cuda)
        event.cuda_event = cuda_event


def new_event(*, times: bool = False) -> torch.cuda.Event:
    """Return a CUDA event, with timing enabled if asked."""
    return torch.cuda.Event(enable_timing=times)  # type: ignore[no-untyped-call]


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream of a GPU, which nothing else uses."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _can_follow(event: Event) -> bool:
    """Whether a GPU can wait on the event, or does not need to."""
    return event.cuda_event is not None or (isinstance(event.stream, ThreadStream) and event.is_done())
