"""Copies between device and host, recorded as a GPU would run them: in streams of their own, each after some events.

On the CPU a thread makes such a copy, compute waits for it as a whole, and work for a separate stream runs at once
(`states/tiers/copy_streams.py`). The order is still declared, and recorded here. So the checker detects data that a GPU
would send to other ranks too early.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from shardwise.dataflow.streams import Event, Failures, ThreadStream
from shardwise.nccl.program import COMPUTE
from shardwise.nccl.recorder import Recorder
from shardwise.nccl.taps import Instead
from shardwise.states.tiers.copy_streams import CopyStreams

_IN, _OUT, _BESIDE = "copies in", "copies out", "update"


class _Mark(Event):
    """A point in the order of a stream. On a CPU it is reached as soon as it is made."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Copies:
    """Records calls of `CopyStreams`, and waits for their events."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers: WeakKeyDictionary[Event, int] = WeakKeyDictionary()
        self._nowhere = ThreadStream("of marks", Failures())

    def attach(self, instead: Instead) -> None:
        """Replace the methods that start copies and wait for them."""
        instead(CopyStreams, "computed", lambda _: lambda _: [self._mark(COMPUTE, ())])
        instead(CopyStreams, "to_device", self._to_device)
        instead(CopyStreams, "to_host_after", self._to_host)
        instead(CopyStreams, "run_after", self._run_after)
        instead(CopyStreams, "follow", self._follow)
        instead(Event, "wait", self._wait)
        instead(Event, "is_done", self._is_done)

    def _to_device(self, call: Any) -> Any:
        def noted(copies: CopyStreams, device: Tensor, host: Tensor, after: Sequence[Event] = ()) -> Event:
            return self._copied(_IN, device, host, after, lambda real: call(copies, device, host, real))

        return noted

    def _to_host(self, call: Any) -> Any:
        def noted(copies: CopyStreams, host: Tensor, device: Tensor, after: Sequence[Event] = ()) -> Event:
            return self._copied(_OUT, device, host, after, lambda real: call(copies, host, device, real))

        return noted

    def _copied(
        self,
        stream: str,
        device: Tensor,
        host: Tensor,
        after: Sequence[Event],
        copy: Callable[[list[Event]], Event],
    ) -> Event:
        self._recorder.memories.note_host(host)
        number = self._recorder.copy(stream, [(device, stream == _IN), (host, stream == _OUT)], self._of(after))
        with self._recorder.silent():
            event = copy([each for each in after if not isinstance(each, _Mark)])
        self._numbers[event] = number
        return event

    def _run_after(self, call: Any) -> Any:
        def noted(copies: CopyStreams, run: Callable[[], object], after: Sequence[Event]) -> list[Event]:
            self._mark(_BESIDE, after)
            with self._recorder.silent():
                for event in after:
                    event.wait()
            before, self._recorder.stream = self._recorder.stream, _BESIDE
            try:
                call(copies, run, ())
            finally:
                self._recorder.stream = before
            return [self._mark(_BESIDE, ())]

        return noted

    def _follow(self, call: Any) -> Any:
        def noted(copies: CopyStreams, event: Event) -> None:
            number = self._numbers.get(event)
            if number is not None:
                self._recorder.wait(number)
            with self._recorder.silent():
                call(copies, event)

        return noted

    def _wait(self, call: Any) -> Any:
        def noted(event: Event) -> None:
            self._known(event, self._recorder.know)
            call(event)

        return noted

    def _is_done(self, call: Any) -> Any:
        def noted(event: Event) -> bool:
            is_done = bool(call(event))
            if is_done:
                self._known(event, self._recorder.see)
            return is_done

        return noted

    def _known(self, event: Event, note: Callable[[int], None]) -> None:
        # A thread that acts as a stream waits for events too, but is not the host.
        is_host = threading.current_thread() is threading.main_thread()
        number = self._numbers.get(event) if is_host and self._recorder.listens() else None
        if number is not None:
            note(number)

    def _mark(self, stream: str, after: Sequence[Event]) -> Event:
        number = self._recorder.copy(stream, (), self._of(after))
        mark = _Mark(self._nowhere, number)
        self._numbers[mark] = number
        return mark

    def _of(self, events: Sequence[Event]) -> tuple[int, ...]:
        return tuple(self._numbers[each] for each in events if each in self._numbers)
