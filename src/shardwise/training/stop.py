"""Ctrl-C and SIGTERM, heard and remembered: a run stops between two steps, when it has saved."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_HEARD = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Within it, a first signal is remembered as `number`; a second does what signals do by themselves."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        # Python lets only the main thread listen.
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._hear) for each in _HEARD}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, story: TracebackType | None
    ) -> None:
        self._restore()

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)
        self._before = {}


def name_of(number: int) -> str:
    return signal.Signals(number).name
