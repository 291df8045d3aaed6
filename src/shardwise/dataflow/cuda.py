"""Streams of a GPU. Waits are the GPU's own events: the thread that puts work in never waits for it.

One thing a GPU cannot wait for is a thread, such as a host function or a disk. What depends on one is handed to a
thread of the stream's own, which issues it as soon as it may; so is what follows it in the same stream, and what
depends on that in others. Where no thread is involved, and that is the usual case, the caller issues by itself.
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
    """An event over one of CUDA's, which is used again when nobody can ask for it any more: making one takes a while.

    A stream that was told to wait for an event waits for what was recorded then, whatever is recorded in it later.
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
        # Events to be used again. Those that tell the time are not, for they are asked later; nor those of a capture.
        self.spare: list[Any] | None = None if times else []
        self._failures = failures
        self._num_put = 0
        self._behind = ThreadStream(f"{name} issue", failures)
        self._num_behind = 0
        self._issued = threading.Condition()
        self.turn_to(stream)

    def turn_to(self, stream: torch.cuda.Stream) -> None:
        """Use another stream of the GPU from now on, as a capture does."""
        self.cuda = stream
        self._raw: int = stream.cuda_stream
        self.device_index: int = stream.device_index

    def put(self, run: Run, after: Sequence[Event], blame: Blame, *, is_captured: bool = False) -> Event:
        self._num_put += 1
        event = CudaEvent(self, self._num_put)
        # Whoever captures issues: what a thread issued later would be in no graph, and run.
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
        """Whether the caller may issue by itself: no thread has to be waited for."""
        # `_num_behind` is lowered by the issuing thread alone, after the event is recorded; seen as 0, all is issued.
        return self._num_behind == 0 and (not after or all(_can_follow(each) for each in after))

    def launch(
        self, run: Any, tensors: Sequence[Any], options: dict[str, Any], grid: Any, after: Sequence[Event]
    ) -> Event:
        """Issue a kernel that the caller may issue: as `put`, with nothing made to be run later."""
        self._num_put += 1
        event = CudaEvent(self, self._num_put)
        self._issue(event, run, after, tensors, {"grid": grid, "warmup": False, **options})
        self.last = event
        return event

    def is_current(self) -> bool:
        """Whether it is the current stream of its GPU in this thread."""
        return bool(raw_stream(self.device_index) == self._raw)

    def relaunch(self, replay: Run, event: Event) -> None:
        """Launch a graph, while this is the current stream, and move its last event behind it.

        Whoever was told to wait for CUDA's event before waits for what was recorded then.
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
        # After a failure what was put behind is never issued, and there may be nobody left to say so.
        while event.cuda_event is None and self._failures.first is None:
            with self._issued:
                if event.cuda_event is None:  # Else it was said while nobody listened.
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
        # Entering a stream takes longer than asking which one is current, and mostly it is this one.
        if current_gpu() == self.device_index and raw_stream(self.device_index) == self._raw:
            run(*args, **options)
        else:
            with torch.cuda.stream(self.cuda):
                run(*args, **options)
        cuda_event.record(self.cuda)
        event.cuda_event = cuda_event


def new_event(*, times: bool = False) -> torch.cuda.Event:
    """An event, with a clock if it is to be asked for times."""
    return torch.cuda.Event(enable_timing=times)  # type: ignore[no-untyped-call]


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of a GPU that nobody else uses."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _can_follow(event: Event) -> bool:
    """Whether a GPU can be told to wait for the event, or need not."""
    return event.cuda_event is not None or (isinstance(event.stream, ThreadStream) and event.is_done())
