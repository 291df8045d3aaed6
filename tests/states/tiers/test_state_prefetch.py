"""The mover of chunks, on copies that happen as late as they may: what comes when, and that no number is lost."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.staging import StagingBuffers
from shardwise.states.tiers.state_prefetch import Incoming, Item, State, StatePrefetch, Written
from shardwise.states.tiers.threaded_prefetch import ThreadedStatePrefetch
from tests.states.tiers.late import LateCopyStreams

SIZE = 5


class Counters:
    """An owner whose chunks are numbers: each has a count at home, and an update adds one to it."""

    def __init__(self, count: int, copies: CopyStreams) -> None:
        self._copies = copies
        self.homes = [torch.zeros(SIZE) for _ in range(count)]
        self.came: list[int] = []
        self.updated: list[int] = []
        self.fails = False

    def incoming(self, one: int) -> Incoming:
        self.came.append(one)
        return Incoming([self.homes[one]], [torch.empty(2)])

    def update(self, one: int, here: list[Tensor], after: list[Event]) -> Written:
        if self.fails:
            raise ValueError("no such luck")
        assert [tuple(each.shape) for each in here] == [(SIZE,), (2,)]
        self.updated.append(one)
        return Written(self._copies.run_after(lambda: here[0].add_(1), after), [(self.homes[one], here[0])])

    def is_sent(self, one: int, events: list[Event]) -> None:
        pass


def make(
    count: int, num_buffers: int, copies: CopyStreams, kind: Any = StatePrefetch
) -> tuple[Counters, StatePrefetch[int]]:
    owner = Counters(count, copies)
    return owner, kind(owner, range(count), StagingBuffers(num_buffers, copies), copies)


def test_those_that_are_expected_come_ahead_in_the_order_of_the_last_step() -> None:
    copies = LateCopyStreams(0)
    owner, prefetch = make(5, 2, copies)
    prefetch.begin()
    assert owner.came == [4, 3], "a backward goes the other way than a forward"
    for order in ([4, 2, 3, 0, 1], [4, 2, 3, 0, 1]):
        for one in order:
            prefetch.ask([one])
        prefetch.end()
        assert owner.updated == order
        owner.came.clear()
        owner.updated.clear()
        prefetch.begin()
        assert owner.came == [4, 2]
    prefetch.close()
    copies.close()


def test_a_chunk_walks_through_the_states_of_the_table() -> None:
    copies = LateCopyStreams(0)
    owner, prefetch = make(3, 1, copies)
    seen: list[State] = []
    update = owner.update

    def look(one: int, here: list[Tensor], after: list[Event]) -> Written:
        seen.append(prefetch.state_of(one))
        return update(one, here, after)

    owner.update = look  # type: ignore[method-assign]
    assert {prefetch.state_of(one) for one in range(3)} == {State.HOST}
    prefetch.begin()
    assert [prefetch.state_of(one) for one in range(3)] == [State.HOST, State.HOST, State.STAGED]
    prefetch.ask([0])
    assert prefetch.state_of(0) is State.HOST, "updated, and its copy home was told"
    assert prefetch.state_of(2) is State.STAGED, "it was dropped for the other, and came again"
    prefetch.ask([2])
    assert seen == [State.LEAVING] * 2
    prefetch.end()
    assert {prefetch.state_of(one) for one in range(3)} == {State.HOST}
    prefetch.close()


def test_where_threads_launch_copies_a_chunk_leaves_until_its_copy_home_is_done() -> None:
    copies = CopyStreams(torch.device("cpu"))
    owner, prefetch = make(1, 1, copies, ThreadedStatePrefetch)
    with prefetch.lock:  # Nobody may come or go meanwhile.
        prefetch._bring(prefetch._items[0])
        assert prefetch.state_of(0) is State.STAGED
        prefetch.ask([0])
        assert prefetch.state_of(0) is State.LEAVING
    prefetch.wait()
    assert prefetch.state_of(0) is State.HOST
    assert owner.homes[0].tolist() == [1.0] * SIZE
    prefetch.close()
    copies.close()


def test_one_that_nobody_expected_takes_the_place_of_the_one_that_came_last() -> None:
    copies = LateCopyStreams(1)
    owner, prefetch = make(6, 2, copies)
    prefetch.begin()
    assert owner.came == [5, 4]
    prefetch.ask([0])
    assert owner.updated == [0]
    assert owner.came == [5, 4, 0, 4], "the one that had to go comes again"
    prefetch.ask([5, 4])
    prefetch.end()
    prefetch.wait()
    assert [float(each[0]) for each in owner.homes] == [1, 0, 0, 0, 1, 1]
    prefetch.close()


@pytest.mark.parametrize("seed", range(30))
def test_every_update_is_made_once_whatever_is_asked_for_when(seed: int) -> None:
    die, copies = random.Random(seed), LateCopyStreams(seed)
    owner, prefetch = make(7, die.randint(1, 4), copies)
    expected = [0] * 7
    for _ in range(6):
        if die.random() < 0.8:
            prefetch.begin()
        asked = die.sample(range(7), die.randint(0, 7))
        for one in asked:
            prefetch.ask([one])
            expected[one] += 1
        if die.random() < 0.2:
            prefetch.wait()
        prefetch.end()
        if die.random() < 0.2:
            prefetch.forget()
    prefetch.wait()
    assert [each.tolist() for each in owner.homes] == [[float(count)] * SIZE for count in expected]
    prefetch.close()


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_a_threaded_prefetch_makes_every_update_once_too(num_buffers: int) -> None:
    copies = CopyStreams(torch.device("cpu"))
    owner, prefetch = make(7, num_buffers, copies, ThreadedStatePrefetch)
    die = random.Random(num_buffers)
    expected = [0] * 7
    for _ in range(20):
        prefetch.begin()
        for one in die.sample(range(7), die.randint(0, 7)):
            prefetch.ask([one])
            expected[one] += 1
            if die.random() < 0.2:
                prefetch.settle([one])
        prefetch.end()
    prefetch.wait()
    assert [each.tolist() for each in owner.homes] == [[float(count)] * SIZE for count in expected]
    prefetch.close()
    copies.close()


def test_of_several_that_are_ready_the_one_comes_first_that_a_forward_uses_first() -> None:
    copies = CopyStreams(torch.device("cpu"))
    owner, prefetch = make(5, 2, copies, ThreadedStatePrefetch)
    prefetch.ask([4, 2, 3, 0, 1])
    prefetch.wait()
    assert owner.updated == [0, 1, 2, 3, 4]
    prefetch.close()
    copies.close()


class NotYet(Event):
    """A gradient that a GPU has still to compute."""

    def __init__(self) -> None:
        self.is_reached = False

    def is_done(self) -> bool:
        return self.is_reached

    def wait(self) -> None:
        pass


def test_while_gradients_are_not_there_those_come_first_that_were_asked_for_first() -> None:
    copies = CopyStreams(torch.device("cpu"))
    events = {one: NotYet() for one in range(4)}
    owner, prefetch = make(4, 2, copies, ThreadedStatePrefetch)
    asked = [Item(one, one, gradients=[events[one]]) for one in (3, 2, 1, 0)]
    assert prefetch._choose(asked).chunk == 3
    events[3].is_reached = events[2].is_reached = True
    assert prefetch._choose(asked).chunk == 2
    prefetch.close()
    copies.close()
    assert not owner.updated


def test_what_goes_wrong_in_an_update_is_kept_and_nobody_waits_for_it() -> None:
    copies = CopyStreams(torch.device("cpu"))
    owner, prefetch = make(3, 2, copies, ThreadedStatePrefetch)
    owner.fails = True
    prefetch.begin()
    prefetch.ask([0, 1, 2])
    prefetch.settle([2])
    prefetch.wait()
    assert isinstance(prefetch.error, ValueError)
    prefetch.close()
    copies.close()
