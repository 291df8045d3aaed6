"""SIGTERM, as services send it, ends a command as Ctrl-C does: with what it has to say, and with its ranks."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise `KeyboardInterrupt` within. Only a main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
