"""Streams and events: threads, and a GPU's streams over a GPU that is played by a list."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.dataflow.cuda import CudaStream
from shardwise.dataflow.streams import Event, Failures, ThreadStream, latest
from tests.dataflow.played import PlayedStream, play


def as_it_is(error: Exception) -> Exception:
    return error


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU was told, in order."""
    return play(monkeypatch)


def played(number: int, log: list[str], failures: Failures | None = None) -> CudaStream:
    stream: Any = PlayedStream(number, log)
    return CudaStream(f"gpu {number}", stream, failures or Failures())


def runs(log: list[str], what: str) -> Callable[[], None]:
    return lambda: log.append(what)


def test_a_gpu_stream_is_told_to_wait_only_for_other_streams(log: list[str]) -> None:
    compute, inward = played(1, log), played(2, log)
    copied = inward.put(runs(log, "2 runs copy"), (), as_it_is)
    first = compute.put(runs(log, "1 runs first"), [copied], as_it_is)
    compute.put(runs(log, "1 runs second"), [first], as_it_is)
    assert log == ["2 runs copy", "1 waits for 2.1", "1 runs first", "1 runs second"]
    assert first.is_done()
    for stream in (compute, inward):
        stream.close()


def test_what_waits_for_a_thread_is_issued_when_the_thread_is_done_and_so_is_what_follows(log: list[str]) -> None:
    failures = Failures()
    host, inward, compute = ThreadStream("host", failures), played(2, log), played(1, log)
    begun, may_end = threading.Event(), threading.Event()

    def host_function() -> None:
        begun.set()
        may_end.wait()
        log.append("host function")

    ready = host.put(host_function, (), as_it_is)
    begun.wait()
    copied = inward.put(runs(log, "2 runs copy"), [ready], as_it_is)  # Not yet: a GPU cannot wait for a thread.
    used = compute.put(runs(log, "1 runs task"), [copied], as_it_is)  # Nor this, for its event is not recorded.
    compute.put(runs(log, "1 runs next"), (), as_it_is)  # Nor this, for it comes later in the stream.
    assert log == []
    may_end.set()
    used.wait()
    assert compute.last is not None
    compute.last.wait()
    assert log == ["host function", "2 runs copy", "1 waits for 2.1", "1 runs task", "1 runs next"]
    compute.put(runs(log, "1 runs at once"), (), as_it_is)
    assert log[-1] == "1 runs at once"
    for stream in (host, inward, compute):
        stream.close()


def test_a_failure_behind_lets_nobody_wait_for_ever(log: list[str]) -> None:
    failures = Failures()
    host, compute = ThreadStream("host", failures), played(1, log, failures)
    may_end = threading.Event()

    def fails() -> None:
        may_end.wait()
        raise ValueError("no")

    ready = host.put(fails, (), as_it_is)
    task = compute.put(runs(log, "1 runs task"), [ready], as_it_is)
    may_end.set()
    task.wait()
    assert isinstance(failures.first, ValueError)
    assert log == []
    host.close()
    compute.close()


def test_events_of_marks_that_nobody_holds_are_used_again_and_others_are_not(log: list[str]) -> None:
    compute, other = played(1, log), played(2, log)
    kept: list[Any] = []
    for number in range(30):
        event = compute.put(runs(log, "1 runs"), (), as_it_is)
        if number % 3 == 0:
            kept.append((event, event.cuda_event.name))  # type: ignore[attr-defined]
            other.put(runs(log, "2 runs"), [event], as_it_is)
    assert all(event.cuda_event.name == name for event, name in kept)
    assert len({id(event.cuda_event) for event, _ in kept}) == 10
    assert compute.spare is not None
    assert len(compute.spare) <= 1
    for stream in (compute, other):
        stream.close()


def test_a_launch_that_fails_is_told_at_once(log: list[str]) -> None:
    def fails() -> None:
        raise ValueError("no")

    compute = played(1, log)
    with pytest.raises(RuntimeError, match="told: no"):
        compute.put(fails, (), lambda error: RuntimeError(f"told: {error}"))
    assert compute.last is None
    compute.close()


def test_threads_run_in_order_and_wait_for_marks() -> None:
    failures, ran = Failures(), []
    one, other = ThreadStream("one", failures), ThreadStream("other", failures)
    may_end = threading.Event()
    first = one.put(may_end.wait, (), as_it_is)
    second = other.put(lambda: ran.append("second"), [first], as_it_is)
    assert not first.is_done()
    assert not second.is_done()
    may_end.set()
    second.wait()
    assert ran == ["second"]
    assert first.is_done()
    one.close()
    other.close()


def test_only_the_last_mark_of_each_stream_counts() -> None:
    streams = [ThreadStream(name, Failures()) for name in "ab"]
    events = [Event(streams[0], 1), Event(streams[1], 5), Event(streams[0], 3), Event(streams[0], 2)]
    assert sorted((event.stream.name, event.number) for event in latest(events)) == [("a", 3), ("b", 5)]
