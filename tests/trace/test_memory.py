import pytest

from shardwise.trace.events import Event, Lane
from shardwise.trace.memory import held_over_time, peaks
from tests.trace.played import GENERATORS, played, trace_of


def holding(name: str, start: float, end: float, at_start: float, at_end: float) -> Event:
    return Event(name, 0, Lane.COMPUTE, start, end, stage=0, microbatch=0, held_at_start=at_start, held_at_end=at_end)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_1f1b_holds_as_many_microbatches_as_the_pipe_below_is_deep(num_ranks: int) -> None:
    assert peaks(played("1f1b", num_ranks, 2 * num_ranks)) == tuple(range(num_ranks, 0, -1))


def test_gpipe_holds_all_microbatches() -> None:
    assert peaks(played("gpipe", 3, 7)) == (7, 7, 7)


def test_the_curve_has_a_step_for_each_instant_that_changes_it() -> None:
    trace = trace_of(holding("0F0", 0, 1, 3, -1), holding("0B0", 2, 4, 0, -2))
    assert held_over_time(trace)[0] == ((0, 3), (1, 2), (4, 0))


def test_what_is_freed_at_an_instant_is_there_for_what_is_taken_then() -> None:
    trace = trace_of(holding("0F1", 2, 3, 1, 0), holding("0F0", 0, 1, 1, 0), holding("0B0", 1, 2, 0, -1))
    assert held_over_time(trace)[0] == ((0, 1),)
    assert peaks(trace) == (1,)


def test_what_takes_no_time_holds_nothing() -> None:
    assert held_over_time(trace_of(holding("0F0", 1, 1, 1, -1)))[0] == ()


def test_an_empty_trace_holds_nothing() -> None:
    assert peaks(trace_of()) == (0,)


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_rank_ends_with_nothing_held_and_never_holds_less(name: str) -> None:
    trace = played(name, 4, 8, times=(1, 1.25, 0.75), hop=0.125)
    curves = held_over_time(trace)
    assert peaks(trace) == tuple(max(held for _, held in curve) for curve in curves)
    for curve in curves:
        assert curve[-1][1] == 0
        assert min(held for _, held in curve) == 0
