"""Signals that end a run. They are recorded, and the run stops between two steps, after saving.

Ctrl-C, SIGTERM, SIGHUP (the terminal or the connection is gone), and SIGUSR1, which batch systems send some time before
a job's time limit. A run that SIGUSR1 stops exits successfully, to be started again.
"""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any, Self

from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopSignals:
    """A context in which the first signal is recorded as `number`. A second one has its default effect."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # In Python only the main thread may install signal handlers.
        if threading.current_thread() is threading.main_thread():
            # Under nohup SIGHUP is ignored, and stays so.
            heard = [each for each in _HEARD if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
            self._before = {each: signal.signal(each, self._hear) for each in heard}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)
        self._before = {}


class Forwarded(StopSignals):
    """Forwards signals to the ranks, which save and stop. A second signal ends them at once.

    So does the first if the ranks have no handlers yet: nothing has been trained that could be lost.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def has_ended(self, error: RankError) -> bool:
        """Return whether the error is a rank that this signal ended before its handlers were installed."""
        return bool(self.number) and any(
            word in error.problem for word in (f"was killed by {name_of(self.number)}", KeyboardInterrupt.__name__)
        )

    def end(self) -> None:
        """Raise the signal again, with its default effect."""
        self._restore()
        signal.raise_signal(self.number)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        super()._hear(number, frame)
        if not self._ranks.process_ids:
            self.end()
        for process in self._ranks.process_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


def name_of(number: int) -> str:
    return signal.Signals(number).name
