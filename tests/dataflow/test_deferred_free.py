"""Memory that copies still use: it is held as long as they need it, and no more of it than was said."""

import weakref
from functools import partial

import pytest
import torch

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.streams import Event, Failures, ThreadStream


class PlayedEvent(Event):
    """Reached when a test says so, or when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.is_reached = log, name, False

    def is_done(self) -> bool:
        return self.is_reached

    def wait(self) -> None:
        if not self.is_reached:
            self.log.append(self.name)
            self.is_reached = True


@pytest.fixture
def log() -> list[str]:
    """What was waited for, in order."""
    return []


def four_bytes() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.uint8)


def test_memory_is_held_until_its_copy_is_over_and_nobody_waits_for_that(log: list[str]) -> None:
    deferred, event, memory = DeferredFree(8), PlayedEvent(log, "copy"), four_bytes()
    held = weakref.ref(memory)
    deferred.hold(event, memory)
    del memory
    deferred.sweep()
    assert held() is not None
    event.is_reached = True
    deferred.sweep()
    assert held() is None
    assert deferred.num_bytes == 0
    assert not log


def test_where_more_is_held_than_may_be_the_oldest_are_waited_for(log: list[str]) -> None:
    deferred = DeferredFree(8)
    for name in "abc":
        deferred.hold(PlayedEvent(log, name), four_bytes(), four_bytes())
    assert deferred.num_bytes == 24
    assert not log, "holding waits for nothing"
    deferred.sweep()
    assert log == ["a", "b"]
    assert deferred.num_bytes == 8
    deferred.wait()
    assert log == ["a", "b", "c"]


def test_what_is_over_behind_something_that_is_not_stays(log: list[str]) -> None:
    deferred, slow, quick = DeferredFree(8), PlayedEvent(log, "slow"), PlayedEvent(log, "quick")
    deferred.hold(slow, four_bytes())
    deferred.hold(quick, four_bytes())
    quick.is_reached = True
    deferred.sweep()
    assert deferred.num_bytes == 8
    slow.is_reached = True
    deferred.sweep()
    assert deferred.num_bytes == 0


def test_one_of_no_room_waits_for_each_copy_of_a_real_stream() -> None:
    stream, deferred = ThreadStream("out", Failures()), DeferredFree(0)
    done: list[int] = []
    for number in range(20):
        deferred.hold(stream.put(partial(done.append, number), (), lambda error: error), four_bytes())
        deferred.sweep()
        assert done == list(range(number + 1))
    stream.close()
