"""Signals that end a run, heard and remembered: it stops between two steps, when it has saved.

Ctrl-C, SIGTERM, SIGHUP (the terminal or the connection is gone), and SIGUSR1: batch systems send it some time before a
job's limit, and a run that it has stopped ends well, to be started again.
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
    """Within it, a first signal is remembered as `number`; a second does what signals do by themselves."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python lets only the main thread listen.
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
    """Signals go on to the ranks, which save and stop; a second one ends them at once.

    So does the first, where the ranks do not listen yet: nothing has been trained that could be lost.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def has_ended(self, error: RankError) -> bool:
        """Whether a rank has failed because it did not listen yet."""
        return bool(self.number) and any(
            word in error.problem for word in (f"was killed by {name_of(self.number)}", KeyboardInterrupt.__name__)
        )

    def end(self) -> None:
        """Do what the signal does by itself."""
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
