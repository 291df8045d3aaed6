"""SIGTERM ends a command as Ctrl-C does."""

import signal
import threading

import pytest

from shardwise.interrupts import ended_by_sigterm


def test_sigterm_is_an_interrupt_within_and_what_it_was_before_after() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_thread_that_gets_no_signals_leaves_them_alone() -> None:
    found = []

    def run() -> None:
        with ended_by_sigterm():
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]
