"""Deep calls of tests have room: Python asks the system for memory once, and not at each call."""

import os
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from tests.deep_calls import with_room

_NUM_CALLS = 100


def _nothing() -> None:
    pass


def _num_pages(depth: int) -> int:
    """Return how many new pages a loop of small calls touches, so many calls below this one."""
    if depth:
        return _num_pages(depth - 1)
    import resource

    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(_NUM_CALLS):
        _nothing()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


@pytest.mark.skipif(sys.platform != "linux", reason="counts the pages of a thread, as Linux does")
def test_with_room_no_depth_of_calls_takes_new_memory_each_time() -> None:
    assert max(with_room(_num_pages)(depth) for depth in range(200)) < _NUM_CALLS


def test_what_is_called_with_room_is_given_all_and_gives_back_all() -> None:
    @with_room
    def joined(*words: str, between: str) -> str:
        return between.join(words)

    assert joined("a", "b", between="-") == "a-b"


def test_a_forked_worker_has_room() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ or os.environ.get("OMP_NUM_THREADS") != "1" or sys.platform != "linux":
        pytest.skip("only workers that are forked have room")
    assert max(each.f_code.co_stacksize for each in _callers()) > 60_000
