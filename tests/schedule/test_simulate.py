"""The simulator against little schedules worked out by hand, and against what holds for every schedule."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.generators.one_f_one_b import one_f_one_b
from shardwise.schedule.instruction import Instruction
from shardwise.schedule.needs import Needs
from shardwise.schedule.passes.communication import insert_communication
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.placement import Placement, loop, mirrored, vee
from shardwise.schedule.prices import Prices, StageTimes, free, stage_prices
from shardwise.schedule.simulate import StuckError, play, simulate
from shardwise.trace.events import Lane, Trace
from tests.schedule.playing import even_prices, event_of, played_schedule, times_of, written

Hop = tuple[float, float]


def priced(
    seconds: Mapping[str, float] | None = None, *, hop: Hop | Mapping[str, Hop] = (0.0, 0.0), slowdown: float = 0.0
) -> Prices:
    """Prices by the text of an instruction; what is not named takes a second. A hop is (until it arrives, occupied)."""

    def of(instruction: Instruction, rank: int) -> float:  # noqa: ARG001 - a stage has one rank
        return (seconds or {}).get(str(instruction), 1.0)

    def of_hop(send: Instruction, source: int, target: int) -> Hop:  # noqa: ARG001 - told by the text of the send
        return hop[str(send)] if isinstance(hop, Mapping) else hop

    return Prices(seconds=of, hop_seconds=of_hop, held=lambda _: (0.0, 0.0), slowdown=slowdown)


# Order and waiting


def test_a_rank_does_one_thing_after_the_other() -> None:
    trace = simulate(written(loop(1), "0F0 0F1 0B1 0B0", num_microbatches=2), priced({"0F1": 2, "0B0": 0.5}))
    assert times_of(trace, ["0F0", "0F1", "0B1", "0B0"]) == [(0, 1), (1, 3), (3, 4), (4, 4.5)]
    assert trace.makespan == trace.span == 4.5
    assert trace.bubble == 0


def test_a_forward_starts_when_the_hop_is_over() -> None:
    trace = simulate(written(loop(2), "0F0 0B0", "1F0 1B0"), priced(hop=(0.5, 0)))
    assert times_of(trace, ["0F0", "1F0", "1B0", "0B0"]) == [(0, 1), (1.5, 2.5), (2.5, 3.5), (4, 5)]
    assert times_of(trace, ["0SEND_F0>1", "1SEND_B0>0"]) == [(1, 1.5), (3.5, 4)]
    assert trace.makespan == trace.span == 5
    assert trace.spans == (5, 2)


def test_a_backward_waits_for_both_who_read_its_value() -> None:
    placement = loop(3).with_skips((0, 2))
    trace = simulate(written(placement, "0F0 0B0", "1F0 1B0", "2F0 2B0"), priced({"1B0": 3}))
    assert times_of(trace, ["2F0", "2B0", "1B0", "0B0"]) == [(2, 3), (3, 4), (4, 7), (7, 8)]


def test_a_pair_starts_when_both_its_halves_may_and_gives_both_results_at_its_end() -> None:
    schedule = written(vee(1), "0F0 1F0 0F1&1B0 1F1 0B0 1B1 0B1", num_microbatches=2)
    trace = simulate(schedule, priced({"0F1&1B0": 2.5}))
    assert times_of(trace, ["0F1&1B0", "1F1", "0B0"]) == [(2, 4.5), (4.5, 5.5), (5.5, 6.5)]


def test_a_schedule_of_which_nothing_costs_anything_takes_no_time() -> None:
    assert simulate(make_schedule("zb-v", 3, 5), free()).makespan == 0


# Transfers


def test_a_receive_that_is_posted_late_delays_the_transfer() -> None:
    busy = {"2F1": 5.0}
    early = written(mirrored(2), "0F0 0SEND_F0>1", "1RECV_F0<0 2F1 1F0", num_microbatches=2)
    late = written(mirrored(2), "0F0 0SEND_F0>1", "2F1 1RECV_F0<0 1F0", num_microbatches=2)
    assert times_of(play(early, priced(busy, hop=(0.5, 0))), ["0SEND_F0>1", "1F0"]) == [(1, 1.5), (5, 6)]
    assert times_of(play(late, priced(busy, hop=(0.5, 0))), ["0SEND_F0>1", "1F0"]) == [(5, 5.5), (5.5, 6.5)]


def test_a_transfer_that_waits_for_its_receive_holds_up_those_behind_it_on_its_link() -> None:
    # The receive of microbatch 0 is posted behind a computation of 5 seconds, that of microbatch 1 at once.
    schedule = written(
        mirrored(2),
        "0F0 0SEND_F0>1 0F2 0SEND_F2>1",
        "1RECV_F2<0 2F1 1RECV_F0<0 1F0 1F2",
        num_microbatches=3,
    )
    trace = play(schedule, priced({"2F1": 5}, hop=(0.5, 0)))
    assert times_of(trace, ["0SEND_F0>1", "0SEND_F2>1"]) == [(5, 5.5), (5, 5.5)]


def test_what_is_sent_later_over_a_link_arrives_no_sooner() -> None:
    schedule = written(loop(2), "0F0 0F1", "1F0 1F1", num_microbatches=2)
    trace = simulate(schedule, priced(hop={"0SEND_F0>1": (5, 0), "0SEND_F1>1": (1, 0)}))
    assert times_of(trace, ["0SEND_F0>1", "0SEND_F1>1"]) == [(1, 6), (2, 6)]
    assert times_of(trace, ["1F0", "1F1"]) == [(6, 7), (7, 8)]


def test_a_transfer_keeps_the_link_to_itself_for_as_long_as_its_bytes_take() -> None:
    schedule = written(loop(2), "0F0 0F1", "1F0 1F1", num_microbatches=2)
    trace = simulate(schedule, priced(hop=(2, 1.5)))
    assert times_of(trace, ["0SEND_F0>1", "0SEND_F1>1"]) == [(1, 3), (2.5, 4.5)]


def test_latency_alone_lets_any_number_of_transfers_be_on_their_way() -> None:
    schedule = written(loop(2), "0F0 0F1", "1F0 1F1", num_microbatches=2)
    trace = simulate(schedule, priced(hop=(2, 0)))
    assert times_of(trace, ["0SEND_F0>1", "0SEND_F1>1"]) == [(1, 3), (2, 4)]


def test_links_to_different_ranks_and_the_two_ways_of_one_do_not_share() -> None:
    trace = simulate(written(loop(3).with_skips((0, 2)), "0F0", "1F0", "2F0"), priced(hop=(3, 3)))
    assert times_of(trace, ["0SEND_F0>1", "0SEND_F0>2", "1SEND_F0>2"]) == [(1, 4), (1, 4), (5, 8)]
    crossing = written(mirrored(2), "0F0 3F1", "2F1 1F0", num_microbatches=2)
    trace = simulate(crossing, priced(hop=(3, 3)))
    assert times_of(trace, ["0SEND_F0>1", "2SEND_F1>3"]) == [(1, 4), (1, 4)]


def test_what_a_rank_sends_to_one_other_shares_the_link_whatever_it_is() -> None:
    # On a V, rank 0 sends rank 1 both the activation of stage 0 and the gradient of stage 3.
    schedule = written(
        vee(2),
        "0F0 0SEND_F0>1 3RECV_F0<2 3F0 3B0 3SEND_B0>2 0F1 0SEND_F1>1",
        "1RECV_F0<0 2RECV_B0<3 1RECV_F1<0 1F0 2F0 2SEND_F0>3 2B0",
        num_microbatches=2,
    )
    trace = play(schedule, priced(hop=(2, 2)))
    assert times_of(trace, ["3SEND_B0>2", "0SEND_F1>1"]) == [(9, 11), (11, 13)]


def test_the_event_of_a_receive_lasts_from_its_posting_to_the_arrival() -> None:
    trace = simulate(written(loop(2), "0F0 0B0", "1F0 1B0"), priced(hop=(0.5, 0)))
    receive = event_of(trace, "1RECV_F0<0")
    assert (receive.start, receive.end, receive.lane, receive.peer) == (0, 1.5, Lane.RECEIVE, 0)
    assert event_of(trace, "0SEND_F0>1").peer == 1


# Transfers that slow computation down


def test_compute_beside_a_transfer_is_slower_for_the_part_that_overlaps_on_both_ranks() -> None:
    schedule = written(mirrored(2), "0F0 0SEND_F0>1 0F2", "1RECV_F0<0 2F1 1F0", num_microbatches=3)
    trace = play(schedule, priced({"2F1": 3}, hop=(1, 0), slowdown=1.0))
    # The transfer is on its way from 1 to 2. Rank 0 does half of 0F2 meanwhile, and the other half in 0.5 s; rank 1
    # has done 1 s of 2F1's 3 before, does 0.5 s of it meanwhile, and has 1.5 s left.
    assert times_of(trace, ["0SEND_F0>1", "0F2", "2F1", "1F0"]) == [(1, 2), (1, 2.5), (0, 3.5), (3.5, 4.5)]


def test_compute_that_lies_inside_a_transfer_is_slower_as_a_whole() -> None:
    schedule = written(loop(2), "0F0 0F1", "1F0 1F1", num_microbatches=2)
    trace = simulate(schedule, priced({"0F1": 2}, hop={"0SEND_F0>1": (4, 0), "0SEND_F1>1": (1, 0)}, slowdown=0.25))
    assert times_of(trace, ["0F1"]) == [(1, 3.5)]
    # The second transfer goes from 3.5 to 5, behind the first. Rank 1 starts when both have arrived.
    assert times_of(trace, ["1F0", "1F1"]) == [(5, 6), (6, 7)]


def test_two_transfers_at_once_slow_a_computation_no_more_than_one() -> None:
    schedule = written(
        loop(3).with_skips((0, 2)),
        "0F0 0SEND_F0>1 0SEND_F0>2 0F1",
        "1RECV_F0<0 1F0 1SEND_F0>2",
        "2RECV_F0<0 2RECV_F0<1 2F0",
        num_microbatches=2,
    )
    hops: dict[str, Hop] = {"0SEND_F0>1": (1, 0), "0SEND_F0>2": (2, 0), "1SEND_F0>2": (0, 0)}
    trace = play(schedule, priced({"0F1": 3}, hop=hops, slowdown=1.0))
    # Slowed from 1 to 3, which is 1 s of its 3, and then 2 s at full pace.
    assert times_of(trace, ["0F1"]) == [(1, 5)]


def test_collectives_and_offloads_slow_the_computation_beside_them_too() -> None:
    reduced = written(vee(1), "0F0 1F0 1B0 1REDUCE0 0B0")
    assert times_of(simulate(reduced, priced({"0B0": 2}, slowdown=1.0)), ["1REDUCE0", "0B0"]) == [(3, 4), (3, 5.5)]
    offloaded = written(loop(1), "0F0 0OFFLOAD0 0F1", num_microbatches=2)
    assert times_of(simulate(offloaded, priced({"0F1": 2}, slowdown=1.0)), ["0F1"]) == [(1, 3.5)]


def test_a_transfer_of_no_length_behind_a_long_one_leaves_the_pace_as_it_was() -> None:
    schedule = written(
        loop(2), "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0F3", "1RECV_F0<0 1RECV_F1<0 1F0 1F1", num_microbatches=4
    )
    trace = play(schedule, priced(hop={"0SEND_F0>1": (4, 0), "0SEND_F1>1": (0, 0)}, slowdown=1.0))
    # Both arrive at 5. Until then rank 0 runs at half its pace, and from then on nothing moves.
    assert times_of(trace, ["0SEND_F0>1", "0SEND_F1>1"]) == [(1, 5), (3, 5)]
    assert times_of(trace, ["0F1", "0F2", "0F3"]) == [(1, 3), (3, 5), (5, 6)]
    assert times_of(trace, ["1F0", "1F1"]) == [(5, 6), (6, 7)]


def test_a_transfer_too_short_to_move_the_clock_slows_nothing() -> None:
    schedule = written(loop(2), "0F0 0F1 0F2", "1F0 1F1 1F2", num_microbatches=3)
    trace = simulate(schedule, priced(hop=(1e-30, 0), slowdown=1.0))
    assert trace.makespan == 4


# What runs beside the computation


def test_a_reduction_runs_beside_the_rest_and_the_step_waits_for_it() -> None:
    schedule = written(vee(1), "0F0 1F0 1B0 1REDUCE0 0B0 0REDUCE0 0STEP0 1STEP0")
    trace = simulate(schedule, priced({"0B0": 2, "1REDUCE0": 1.5, "0REDUCE0": 0.5}))
    assert times_of(trace, ["1REDUCE0", "0B0", "0REDUCE0"]) == [(3, 4.5), (3, 5), (5, 5.5)]
    assert times_of(trace, ["0STEP0", "1STEP0"]) == [(5.5, 6.5), (6.5, 7.5)]


def test_collectives_of_a_rank_run_one_after_the_other() -> None:
    schedule = written(vee(1), "0GATHER0 1GATHER0 0F0 1F0 1B0 0B0")
    trace = simulate(schedule, priced({"0GATHER0": 2, "1GATHER0": 2}))
    assert times_of(trace, ["0GATHER0", "1GATHER0", "0F0", "1F0"]) == [(0, 2), (2, 4), (2, 3), (4, 5)]


def test_the_reduction_of_a_tie_waits_for_the_other_rank() -> None:
    schedule = lower(written(loop(2).with_ties((0, 1)), "0F0 0B0", "1F0 1B0"))
    trace = simulate(schedule, priced({"0B0": 3}))
    assert times_of(trace, ["0B0", "0REDUCE0~0", "1REDUCE0~0", "1STEP0"]) == [(3, 6), (6, 7), (6, 7), (7, 8)]


def test_a_release_takes_no_time() -> None:
    trace = simulate(written(loop(1), "0GATHER0 0F0 0B0 0RELEASE0"), priced())
    assert times_of(trace, ["0RELEASE0"]) == [(3, 3)]


def test_a_reload_that_was_issued_too_late_is_waited_for() -> None:
    late = written(loop(1), "0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0", num_microbatches=2)
    soon = written(loop(1), "0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0B0", num_microbatches=2)
    assert times_of(simulate(late, priced()), ["0OFFLOAD0", "0RELOAD0", "0B0"]) == [(1, 2), (3, 4), (4, 5)]
    assert times_of(simulate(soon, priced()), ["0OFFLOAD0", "0RELOAD0", "0B0"]) == [(1, 2), (2, 3), (3, 4)]


def test_a_reload_waits_for_its_offload_and_the_two_directions_run_at_once() -> None:
    schedule = written(loop(1), "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0B0", num_microbatches=3)
    trace = simulate(schedule, priced({"0OFFLOAD0": 2, "0OFFLOAD1": 2, "0RELOAD0": 3}))
    assert times_of(trace, ["0OFFLOAD0", "0OFFLOAD1", "0RELOAD0", "0B0"]) == [(1, 3), (3, 5), (3, 6), (6, 7)]


# Waiting for each other


def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    schedule = written(loop(2), "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", num_microbatches=2)
    with pytest.raises(StuckError) as caught:
        simulate(schedule, priced())
    assert caught.value.problem == "2 ranks wait for each other"
    nodes = Needs(insert_communication(schedule)).nodes
    assert {str(nodes[node]): str(nodes[need]) for node, need in caught.value.waiting.items()} == {
        "0B0": "0RECV_B0<1",
        "1F1": "1RECV_F1<0",
    }


def test_receives_in_another_order_than_their_sends_get_the_link_stuck() -> None:
    schedule = written(loop(2), "0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F1<0 1F1 1RECV_F0<0 1F0", num_microbatches=2)
    with pytest.raises(StuckError) as caught:
        play(schedule, priced())
    nodes = Needs(schedule).nodes
    assert {str(nodes[node]): str(nodes[need]) for node, need in caught.value.waiting.items()} == {"1F1": "1RECV_F1<0"}


def test_a_rank_that_waits_for_itself_is_stuck() -> None:
    with pytest.raises(StuckError):
        simulate(written(loop(1), "0B0 0F0"), priced())


# Causes


def chain(trace: Trace) -> list[str]:
    """The names of the events that led to the last one, from the first."""
    index: int | None = max(range(len(trace.events)), key=lambda each: trace.events[each].end)
    names: list[str] = []
    while index is not None:
        names.append(trace.events[index].name)
        index = trace.events[index].after
    return names[::-1]


def test_following_the_causes_back_gives_the_critical_path() -> None:
    trace = simulate(one_f_one_b(2, 2), priced({"0B0": 3}, hop=(0.25, 0)))
    assert chain(trace) == [
        "0F0", "0SEND_F0>1", "1F0", "1B0", "1SEND_B0>0", "0B0", "0B1",
    ]  # fmt: skip


def test_the_cause_of_a_transfer_that_waited_for_its_link_is_the_one_before_it() -> None:
    schedule = written(loop(2), "0F0 0F1", "1F0 1F1", num_microbatches=2)
    trace = simulate(schedule, priced(hop=(2, 1.5)))
    waited = event_of(trace, "0SEND_F1>1")
    assert waited.after is not None
    assert trace.events[waited.after].name == "0SEND_F0>1"


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("hop", [0.0, 0.125])
def test_everything_starts_when_its_cause_ends(name: str, hop: float) -> None:
    trace = played_schedule(lower(make_schedule(name, 4, 8)), (1, 1.25, 0.75), hop=hop)
    for event in trace.events:
        if event.after is None:
            assert event.start == 0
        elif event.lane is Lane.RECEIVE:
            assert event.end == trace.events[event.after].end
        else:
            assert event.start == trace.events[event.after].end


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_path_of_causes_is_as_long_as_the_makespan(name: str) -> None:
    trace = played_schedule(make_schedule(name, 4, 8), (1, 1.25, 0.75), hop=0.125)
    index: int | None = max(range(len(trace.events)), key=lambda each: trace.events[each].end)
    length = 0.0
    while index is not None:
        event = trace.events[index]
        length += event.seconds if event.lane is not Lane.RECEIVE else 0
        index = event.after
    assert length == trace.makespan


# What holds for every schedule


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_same_schedule_played_twice_gives_the_same_trace(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    prices = even_prices(schedule.placement, (1, 1.2, 0.8), hop=0.05, slowdown=0.1)
    assert simulate(schedule, prices) == simulate(schedule, prices)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_lowered_schedule_is_played_as_it_stands(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    prices = even_prices(schedule.placement, (1, 1.2, 0.8), hop=0.05, slowdown=0.1)
    lowered = insert_communication(schedule)
    assert simulate(lowered, prices) == play(lowered, prices) == simulate(schedule, prices)


@st.composite
def uneven_prices(draw: st.DrawFn, placement: Placement) -> tuple[list[StageTimes], list[float]]:
    lengths = st.integers(min_value=1, max_value=12).map(lambda quarters: quarters / 4)
    times = [
        StageTimes(forward=draw(lengths), input_gradient=draw(lengths), weight_gradient=draw(lengths))
        for _ in range(placement.num_ranks)
    ]
    hops = [draw(st.integers(min_value=0, max_value=4)) / 4 for _ in range(placement.num_ranks - 1)]
    return times, hops


NAMES = [name for name in CATALOGUE if name != "pipedream-2bw"]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(NAMES), st.sampled_from([2, 3, 4]))
def test_no_schedule_is_done_before_its_busiest_rank_nor_sooner_when_a_price_rises(
    data: st.DataObject, name: str, num_ranks: int
) -> None:
    num_ranks += num_ranks % 2 if CATALOGUE[name].mirrored else 0
    schedule = insert_communication(make_schedule(name, num_ranks, 2 * num_ranks))
    placement = schedule.placement
    times, hops = data.draw(uneven_prices(placement))
    trace = play(schedule, stage_prices(placement, times, hops=hops))
    work = [2 * num_ranks * each.total for each in times]
    assert trace.busy == pytest.approx(work)
    assert trace.makespan >= trace.span >= max(trace.busy)

    rank = data.draw(st.integers(min_value=0, max_value=num_ranks - 1))
    field = data.draw(st.sampled_from(["forward", "input_gradient", "weight_gradient", "hop"]))
    if field == "hop":
        hops[min(rank, num_ranks - 2)] += 0.25
    else:
        each = times[rank]
        longer = {
            "forward": each.forward,
            "input_gradient": each.input_gradient,
            "weight_gradient": each.weight_gradient,
        }
        longer[field] += 0.25
        times[rank] = StageTimes(**longer)
    assert play(schedule, stage_prices(placement, times, hops=hops)).makespan >= trace.makespan


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(NAMES))
def test_every_event_waits_for_all_that_it_needs_and_for_its_rank(data: st.DataObject, name: str) -> None:
    schedule = insert_communication(make_schedule(name, 4, 8))
    times, hops = data.draw(uneven_prices(schedule.placement))
    slowdown = data.draw(st.sampled_from([0.0, 0.5]))
    trace = play(schedule, stage_prices(schedule.placement, times, hops=hops, slowdown=slowdown))
    needs = Needs(schedule)
    for node, event in enumerate(trace.events):
        if event.lane is not Lane.RECEIVE:
            assert all(trace.events[before].end <= event.start for before in needs.before[node])
    for events in trace.compute:
        assert all(one.end <= other.start for one, other in pairwise(events))
