from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.trace.attribution import Cause, Gap, critical_path, gaps, idle_by_cause, work_of_ranks
from shardwise.trace.events import Lane, Trace
from tests.trace.played import GENERATORS, event, played, trace_of

sizes = pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 2), (2, 5), (4, 4), (4, 9), (8, 16)])
# Multiples of a sixteenth: their sums are exact, so equality can be asked for.
sixteenths = st.integers(min_value=1, max_value=40).map(lambda count: count / 16)


@sizes
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_pipe_of_unit_times_fills_from_above_and_empties_from_below(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    """F = 1 and B = 2: a forward per rank to fill, a backward per rank to empty, the rest of 3 (p - 1) in between."""
    for rank, idle in enumerate(idle_by_cause(played(name, num_ranks, num_microbatches))):
        assert idle == {
            Cause.WARM_UP: rank,
            Cause.COOL_DOWN: 2 * rank,
            Cause.WAITING: 3 * (num_ranks - 1 - rank),
            Cause.TRANSFER: 0,
            Cause.COLLECTIVE: 0,
        }


@sizes
def test_gpipe_sees_of_its_hops_only_the_first_of_each_kind(num_ranks: int, num_microbatches: int) -> None:
    hop = 0.125
    for rank, idle in enumerate(idle_by_cause(played("gpipe", num_ranks, num_microbatches, hop=hop))):
        assert idle[Cause.WARM_UP] == rank * (1 + hop)
        assert idle[Cause.COOL_DOWN] == rank * (2 + hop)
        assert idle[Cause.TRANSFER] == (hop if rank < num_ranks - 1 else 0)


def test_a_gap_says_for_which_event_of_which_rank_it_waits() -> None:
    found = gaps(played("gpipe", 2, 2))[0]
    assert found == (Gap(rank=0, start=2, end=5, cause=Cause.WAITING, on_rank=1, on="1B0"),)


def test_a_gap_that_a_transfer_ends_is_cut_where_the_transfer_began() -> None:
    waiting, moving = gaps(played("gpipe", 2, 2, hop=0.25))[0]
    assert waiting == Gap(rank=0, start=2, end=5.25, cause=Cause.WAITING, on_rank=1, on="1B0")
    assert moving == Gap(rank=0, start=5.25, end=5.5, cause=Cause.TRANSFER, on_rank=1, on="1SEND_B0>0")


def test_warm_up_names_what_it_waits_for_too() -> None:
    first, second, last = gaps(played("1f1b", 2, 2, hop=0.25))[1][0:3]
    assert (first.cause, first.on) == (Cause.WARM_UP, "0F0")
    assert (second.cause, second.on) == (Cause.WARM_UP, "0SEND_F0>1")
    assert last.cause is Cause.COOL_DOWN


def test_a_rank_that_never_waits_has_no_gaps() -> None:
    assert gaps(played("1f1b", 1, 3))[0] == ()


def test_a_queue_on_the_link_is_exposed_communication_of_what_stands_before() -> None:
    trace = trace_of(
        event("0F0", 0, 0, 1),
        event("0SEND_F0>1", 0, 1, 3, lane=Lane.SEND, after=0),
        event("0SEND_F1>1", 0, 3, 5, lane=Lane.SEND, after=1),
        event("1F9", 1, 0, 2),
        event("1F1", 1, 5, 6, after=2),
    )
    assert [(gap.start, gap.end, gap.cause, gap.on) for gap in gaps(trace)[1]] == [
        (2, 3, Cause.TRANSFER, "0SEND_F0>1"),
        (3, 5, Cause.TRANSFER, "0SEND_F1>1"),
    ]


def test_a_gather_before_the_first_forward_is_no_warm_up() -> None:
    trace = trace_of(event("0GATHER0", 0, 0, 2, lane=Lane.COLLECTIVE), event("0F0", 0, 2, 3, after=0))
    assert gaps(trace)[0] == (Gap(rank=0, start=0, end=2, cause=Cause.COLLECTIVE, on_rank=0, on="0GATHER0"),)


def test_a_gap_before_a_reload_is_the_reload_and_before_it_what_held_it_up() -> None:
    trace = trace_of(
        event("0F0", 0, 0, 1),
        event("0OFFLOAD0", 0, 1, 2, lane=Lane.OFFLOAD, after=0),
        event("0RELOAD0", 0, 2, 4, lane=Lane.RELOAD, after=1),
        event("0B0", 0, 4, 6, after=2),
    )
    assert [(gap.seconds, gap.cause, gap.on) for gap in gaps(trace)[0]] == [
        (1, Cause.COLLECTIVE, "0OFFLOAD0"),
        (2, Cause.COLLECTIVE, "0RELOAD0"),
    ]


def test_a_reduction_after_the_last_backward_is_no_cool_down() -> None:
    trace = trace_of(
        event("0B0", 0, 0, 1),
        event("0REDUCE0", 0, 1.5, 3, lane=Lane.COLLECTIVE, after=0),
        event("1B0", 1, 0, 4),
    )
    assert [(gap.seconds, gap.cause) for gap in gaps(trace)[0]] == [
        (0.5, Cause.COOL_DOWN),
        (1.5, Cause.COLLECTIVE),
        (1, Cause.COOL_DOWN),
    ]


def test_a_step_that_takes_time_is_work_and_one_that_takes_none_explains_nothing() -> None:
    trace = trace_of(
        event("0B0", 0, 0, 1),
        event("0REDUCE0", 0, 1, 3, lane=Lane.COLLECTIVE, after=0),
        event("0STEP0", 0, 3, 3, lane=Lane.STEP, after=1),
        event("0F1", 0, 3, 4, after=2),
        event("0STEP1", 0, 4, 6, lane=Lane.STEP, after=3),
    )
    assert [(gap.start, gap.end, gap.cause) for gap in gaps(trace)[0]] == [(1, 3, Cause.COLLECTIVE)]


def test_an_event_that_says_not_what_it_came_after_leaves_a_gap_on_no_account() -> None:
    trace = trace_of(event("0F0", 0, 0, 1), event("0F1", 0, 2, 3))
    assert gaps(trace)[0] == (Gap(rank=0, start=1, end=2, cause=Cause.WAITING),)


def test_a_receive_in_the_chain_is_passed_over_to_its_send() -> None:
    trace = trace_of(
        event("0F0", 0, 0, 2),
        event("0SEND_F0>1", 0, 2, 3, lane=Lane.SEND, after=0),
        event("1RECV_F0<0", 1, 0, 3, lane=Lane.RECEIVE, after=1),
        event("1F9", 1, 0, 1),
        event("1F0", 1, 3, 4, after=2),
    )
    assert [(gap.seconds, gap.cause) for gap in gaps(trace)[1]] == [(1, Cause.WAITING), (1, Cause.TRANSFER)]


def test_a_rank_that_computes_nothing_is_all_cool_down() -> None:
    trace = Trace(name="half empty", num_ranks=2, events=(event("0F0", 0, 0, 2),))
    assert gaps(trace)[1] == (Gap(rank=1, start=0, end=2, cause=Cause.COOL_DOWN),)


def test_an_empty_trace_has_no_gaps_and_no_path() -> None:
    trace = trace_of()
    assert gaps(trace)[0] == ()
    assert critical_path(trace) == ()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(GENERATORS)),
    num_ranks=st.integers(min_value=2, max_value=5),
    rounds=st.integers(min_value=2, max_value=3),
    times=st.tuples(sixteenths, sixteenths, sixteenths),
    hop=st.one_of(st.just(0.0), sixteenths),
)
def test_idle_and_busy_time_make_up_the_makespan_exactly(
    name: str, num_ranks: int, rounds: int, times: tuple[float, float, float], hop: float
) -> None:
    trace = played(name, num_ranks, rounds * num_ranks, times=times, hop=hop)
    for busy, idle in zip(trace.busy, idle_by_cause(trace), strict=True):
        assert busy + sum(idle.values()) == trace.makespan


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(GENERATORS)),
    num_ranks=st.integers(min_value=2, max_value=4),
    times=st.tuples(*[st.floats(min_value=0.01, max_value=5)] * 3),
    hop=st.floats(min_value=0, max_value=2),
    slowdown=st.sampled_from([0.0, 0.3]),
)
def test_gaps_and_work_tile_the_time_of_each_rank(
    name: str, num_ranks: int, times: tuple[float, float, float], hop: float, slowdown: float
) -> None:
    trace = played(name, num_ranks, 2 * num_ranks, times=times, hop=hop, slowdown=slowdown)
    for rank, work in enumerate(work_of_ranks(trace)):
        pieces = [(gap.start, gap.end) for gap in gaps(trace)[rank]] + [(event.start, event.end) for event in work]
        pieces.sort()
        assert pieces[0][0] == trace.start
        assert pieces[-1][1] == trace.start + trace.makespan
        assert all(end == start for (_, end), (start, _) in pairwise(pieces))


@sizes
def test_the_critical_path_of_gpipe_is_one_way_through_and_one_way_back(num_ranks: int, num_microbatches: int) -> None:
    path = [
        event for event in critical_path(played("gpipe", num_ranks, num_microbatches)) if event.lane is Lane.COMPUTE
    ]
    longest = num_ranks + num_microbatches - 1
    assert ["F" in event.name for event in path] == [True] * longest + [False] * longest


@pytest.mark.parametrize("hop", [0.0, 0.125])
@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_the_critical_path_has_no_holes_and_is_the_makespan(name: str, hop: float) -> None:
    trace = played(name, 4, 8, hop=hop)
    path = critical_path(trace)
    assert path[0].start == trace.start
    assert all(later.start == earlier.end for earlier, later in pairwise(path))
    assert sum(event.seconds for event in path) == trace.makespan


def test_an_event_that_came_after_itself_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="0F0 of rank 0 is said to have come after itself"):
        critical_path(trace_of(event("0F0", 0, 0, 1, after=0)))
