"""Where a GPU stands: behind its host, or not; on the CPU, whose copies are done at once, as far as one is told."""

import threading

import torch

from shardwise.ranks.device_progress import DeviceProgress
from shardwise.ranks.stall import RankLocation, find_stall


class Slow(DeviceProgress):
    """Its device comes to a mark when it is let."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waiting: list[int] = []

    def mark(self, place: object) -> None:
        before = int(self._written[0])
        super().mark(place)
        self.waiting.append(int(self._written[0]))
        self._written[0] = before

    def pass_one(self) -> None:
        self._written[0] = self.waiting.pop(0)


def test_a_device_that_keeps_up_is_not_behind() -> None:
    progress = DeviceProgress(torch.device("cpu"))
    assert progress.behind() is None
    for place in ("F0", "B0"):
        progress.mark(place)
        assert progress.behind() is None


def test_a_device_stands_at_the_last_mark_that_it_has_passed() -> None:
    progress = Slow()
    for place in ("F0", "F1", "B0"):
        progress.mark(place)
    assert progress.behind() == (-1, "the start")
    progress.pass_one()
    assert progress.behind() == (0, "F0")
    assert progress.behind() == (0, "F0")
    progress.pass_one()
    assert progress.behind() == (1, "F1")
    progress.pass_one()
    assert progress.behind() is None


def test_a_device_that_has_not_answered_is_behind_at_the_last_mark() -> None:
    progress, may_answer = DeviceProgress(torch.device("cpu")), threading.Event()
    progress.mark("F0")
    at_once = progress._ask

    def later(number: int) -> None:
        assert may_answer.wait(60)
        at_once(number)

    progress._ask = later  # type: ignore[method-assign]
    progress.ask()
    progress.ask()
    assert progress.behind() == (0, "F0")
    progress.mark("F1")
    assert progress.behind() == (1, "F1")
    may_answer.set()
    while progress.behind() is not None:
        pass


def test_marks_may_be_made_and_read_by_two_threads_and_numbers_used_again() -> None:
    progress, is_over, seen = DeviceProgress(torch.device("cpu")), threading.Event(), list[object]()

    def look() -> None:
        while not is_over.is_set():
            seen.append(progress.behind())

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(5000):
        progress.mark(number)
    is_over.set()
    thread.join()
    assert seen
    assert progress.behind() is None


def at(rank: int, place: str, seconds: float, *, on_gpu: bool = False, silent: float = 0.0) -> RankLocation:
    others = tuple(other for other in range(3) if other != rank) if on_gpu else ()
    return RankLocation(rank=rank, at=place, at_seconds=seconds, silent_seconds=silent, waits_for=others, on_gpu=on_gpu)


def test_of_ranks_whose_gpus_wait_the_one_that_does_not_is_named() -> None:
    places = [at(0, "0F1", 9, on_gpu=True), at(1, "0B0", 9, on_gpu=True), at(2, "the end of its instructions", 9)]
    for me in (0, 1):
        error = find_stall(places, me, limit_seconds=5)
        assert error is not None
        assert error.rank == 2
        assert error.problem.startswith("rank 2 has been at the end of its instructions for 9 s\n")
        assert "rank 0 waits on its GPU at 0F1 (9 s)" in error.problem


def test_of_ranks_whose_gpus_wait_the_one_that_is_silent_is_named() -> None:
    places = [at(0, "0F1", 9, on_gpu=True), at(1, "0F1", 9, on_gpu=True), at(2, "0F1", 9, on_gpu=True, silent=6)]
    error = find_stall(places, 0, limit_seconds=5)
    assert error is not None
    assert error.rank == 2


def test_a_host_that_stands_somewhere_is_not_named_while_another_rank_is_silent() -> None:
    places = [at(0, "0F1", 9, on_gpu=True), at(1, "1RECV_F1<0", 9), at(2, "the norm", 5, silent=4)]
    assert find_stall(places, 0, limit_seconds=5) is None
    error = find_stall([*places[:2], at(2, "the norm", 6, silent=5)], 0, limit_seconds=5)
    assert error is not None
    assert error.rank == 2
    error = find_stall([*places[:2], at(2, "the norm", 6)], 0, limit_seconds=5)
    assert error is not None
    assert error.rank == 1


def test_gpus_that_only_compute_for_long_are_no_stall_until_they_do_so_for_very_long() -> None:
    places = [at(rank, "0F1", 9, on_gpu=True) for rank in range(3)]
    assert find_stall(places, 0, limit_seconds=5) is None
    places = [at(rank, "0F1", 16, on_gpu=True) for rank in range(3)]
    error = find_stall(places, 0, limit_seconds=5)
    assert error is not None
    assert "have waited for each other for 16 s" in error.problem


def test_many_gpus_that_wait_are_looked_through_once_each() -> None:
    many = 512
    places = [
        RankLocation(
            rank=rank, at="0F0", at_seconds=9, on_gpu=True, waits_for=tuple(o for o in range(many) if o != rank)
        )
        for rank in range(many)
    ]
    assert find_stall(places, 0, limit_seconds=5) is None
