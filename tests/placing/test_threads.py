"""Threads of places: they end together, and the first error is the caller's."""

import threading

import pytest
import torch

from shardwise.execution.threads import Mail, ThreadContext, run_together


def test_places_hand_each_other_what_is_addressed_to_them() -> None:
    mail, got = Mail(), []

    def first() -> None:
        got.append(mail.collect("first"))
        mail.post("second", 2)

    def second() -> None:
        mail.post("first", 1)
        got.append(mail.collect("second"))

    run_together([("a", first), ("b", second)], mail, ThreadContext.here(1))
    assert got == [1, 2]


def test_the_first_error_stops_those_that_wait_and_reaches_the_caller() -> None:
    mail = Mail()

    def fail() -> None:
        raise ValueError("broken")

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="broken") as caught:
        run_together([("a", lambda: mail.collect("never")), ("b", fail)], mail, ThreadContext.here(1))
    assert caught.value.__notes__ == ["on b"]
    assert set(threading.enumerate()) <= before


def test_threads_have_the_callers_settings_and_leave_the_caller_its_own() -> None:
    found: list[tuple[bool, bool, int]] = []
    num_threads = torch.get_num_threads()

    def note() -> None:
        found.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()))

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        run_together([("a", note)], Mail(), ThreadContext.here(1))
    run_together([("a", note)], Mail(), ThreadContext.here(2))
    assert found == [(False, True, 1), (True, False, 2)]
    assert torch.get_num_threads() == num_threads
