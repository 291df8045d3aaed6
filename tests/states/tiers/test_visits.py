"""The mover of rounds, on copies that happen as late as they may: what comes when, and that no number is lost."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import Crossing
from shardwise.states.tiers.paced_prefetch import PacedVisits
from shardwise.states.tiers.staging import Slots
from shardwise.states.tiers.state_prefetch import Homes, Visits, Written
from tests.states.tiers.late import LateCrossing

SIZE = 5


class Counters:
    """An owner whose rounds are numbers: each has a count at home, and an update adds one to it."""

    def __init__(self, count: int, crossing: Crossing) -> None:
        self._crossing = crossing
        self.homes = [torch.zeros(SIZE) for _ in range(count)]
        self.came: list[int] = []
        self.updated: list[int] = []
        self.fails = False

    def homes_of(self, one: int) -> Homes:
        self.came.append(one)
        return Homes([self.homes[one]], [torch.empty(2)])

    def update(self, one: int, here: list[Tensor], after: list[Event]) -> Written:
        if self.fails:
            raise ValueError("no such luck")
        assert [tuple(each.shape) for each in here] == [(SIZE,), (2,)]
        self.updated.append(one)
        return Written(self._crossing.apart(lambda: here[0].add_(1), after), [(self.homes[one], here[0])])

    def is_sent(self, one: int, marks: list[Event]) -> None:
        pass


def make(count: int, num_slots: int, crossing: Crossing, kind: Any = Visits) -> tuple[Counters, Visits[int]]:
    owner = Counters(count, crossing)
    return owner, kind(owner, range(count), Slots(num_slots, crossing), crossing)


def test_those_that_are_expected_come_ahead_in_the_order_of_the_last_step() -> None:
    crossing = LateCrossing(0)
    owner, visits = make(5, 2, crossing)
    visits.begin()
    assert owner.came == [4, 3], "a backward goes the other way than a forward"
    for order in ([4, 2, 3, 0, 1], [4, 2, 3, 0, 1]):
        for one in order:
            visits.ask([one])
        visits.end()
        assert owner.updated == order
        owner.came.clear()
        owner.updated.clear()
        visits.begin()
        assert owner.came == [4, 2]
    visits.close()
    crossing.close()


def test_one_that_nobody_expected_takes_the_place_of_the_one_that_came_last() -> None:
    crossing = LateCrossing(1)
    owner, visits = make(6, 2, crossing)
    visits.begin()
    assert owner.came == [5, 4]
    visits.ask([0])
    assert owner.updated == [0]
    assert owner.came == [5, 4, 0, 4], "the one that had to go comes again"
    visits.ask([5, 4])
    visits.end()
    visits.wait()
    assert [float(each[0]) for each in owner.homes] == [1, 0, 0, 0, 1, 1]
    visits.close()


@pytest.mark.parametrize("seed", range(30))
def test_every_update_is_made_once_whatever_is_asked_for_when(seed: int) -> None:
    die, crossing = random.Random(seed), LateCrossing(seed)
    owner, visits = make(7, die.randint(1, 4), crossing)
    expected = [0] * 7
    for _ in range(6):
        if die.random() < 0.8:
            visits.begin()
        asked = die.sample(range(7), die.randint(0, 7))
        for one in asked:
            visits.ask([one])
            expected[one] += 1
        if die.random() < 0.2:
            visits.wait()
        visits.end()
        if die.random() < 0.2:
            visits.forget()
    visits.wait()
    assert [each.tolist() for each in owner.homes] == [[float(count)] * SIZE for count in expected]
    visits.close()


@pytest.mark.parametrize("num_slots", [1, 3])
def test_paced_visits_make_every_update_once_too(num_slots: int) -> None:
    crossing = Crossing(torch.device("cpu"))
    owner, visits = make(7, num_slots, crossing, PacedVisits)
    die = random.Random(num_slots)
    expected = [0] * 7
    for _ in range(20):
        visits.begin()
        for one in die.sample(range(7), die.randint(0, 7)):
            visits.ask([one])
            expected[one] += 1
            if die.random() < 0.2:
                visits.settle([one])
        visits.end()
    visits.wait()
    assert [each.tolist() for each in owner.homes] == [[float(count)] * SIZE for count in expected]
    visits.close()
    crossing.close()


def test_of_several_that_are_ready_the_one_comes_first_that_a_forward_uses_first() -> None:
    crossing = Crossing(torch.device("cpu"))
    owner, visits = make(5, 2, crossing, PacedVisits)
    visits.ask([4, 2, 3, 0, 1])
    visits.wait()
    assert owner.updated == [0, 1, 2, 3, 4]
    visits.close()
    crossing.close()


class NotYet(Event):
    """A gradient that a GPU has still to compute."""

    def __init__(self) -> None:
        self.is_reached = False

    def is_done(self) -> bool:
        return self.is_reached

    def wait(self) -> None:
        pass


def test_while_gradients_are_not_there_those_come_first_that_were_asked_for_first() -> None:
    crossing = Crossing(torch.device("cpu"))
    marks = {one: NotYet() for one in range(4)}
    owner, visits = make(4, 2, crossing, PacedVisits)
    choose: Callable[[list[int]], int] = visits._choose
    visits._asked = {one: [marks[one]] for one in (3, 2, 1, 0)}
    assert choose([3, 2, 1, 0]) == 3
    marks[3].is_reached = marks[2].is_reached = True
    assert choose([3, 2, 1, 0]) == 2
    visits._asked = {}
    visits.close()
    crossing.close()
    assert not owner.updated


def test_what_goes_wrong_in_an_update_is_kept_and_nobody_waits_for_it() -> None:
    crossing = Crossing(torch.device("cpu"))
    owner, visits = make(3, 2, crossing, PacedVisits)
    owner.fails = True
    visits.begin()
    visits.ask([0, 1, 2])
    visits.settle([2])
    visits.wait()
    assert isinstance(visits.error, ValueError)
    visits.close()
    crossing.close()
