"""Placements: as drawn, and never worse for a load than before."""

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.sharding.expert.placement import Placement, balanced


def test_slots_are_as_drawn() -> None:
    assert Placement.even(6, 2).order == (0, 1, 2, 3, 4, 5)
    # 14 and 8: what makes both 11 is to swap the 4 for the 1.
    assert balanced(Placement.even(6, 2), [5, 5, 4, 1, 4, 3]).order == (0, 1, 3, 2, 4, 5)


def test_experts_that_do_not_divide_are_spread_evenly() -> None:
    assert Placement.even(6, 4).ranks == ((0, 1), (2, 3), (4,), (5,))
    assert Placement.even(6, 4).sizes == (2, 2, 1, 1)


def test_an_even_load_moves_nobody() -> None:
    home = Placement.even(64, 8)
    assert balanced(home, [7] * 64) == home
    assert balanced(home, [0] * 64) == home


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 1000), min_size=4, max_size=24))
def test_balancing_never_raises_the_peak_and_leaves_who_stays_in_its_slot(num_ranks: int, load: list[int]) -> None:
    home = Placement.even(len(load), num_ranks)
    found = balanced(home, load)
    assert found.peak(load) <= home.peak(load)
    assert found.sizes == home.sizes
    assert sorted(found.order) == list(range(len(load)))
    for before, after in zip(home.ranks, found.ranks, strict=True):
        assert all(before.index(expert) == slot for slot, expert in enumerate(after) if expert in before)
    assert balanced(found, load) == found


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=6, max_size=6))
def test_of_few_experts_the_peak_is_near_the_least_that_can_be(load: list[int]) -> None:
    least = min(Placement((order[:3], order[3:])).peak(load) for order in permutations(range(6)))
    assert balanced(Placement.even(6, 2), load).peak(load) <= 1.2 * least
