from itertools import pairwise

import pytest

from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.hidden import hidden_of_ranks
from shardwise.trace.stretches import BUBBLE, Part, parts_of_ranks, stretches
from tests.trace.played import GENERATORS, played


def measured(*events: Event, windows: tuple[tuple[float, float], ...]) -> Trace:
    return Trace(name="by hand", num_ranks=len(windows), events=events, windows=windows)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("hop", [0.0, 0.25])
def test_the_parts_of_a_predicted_step_add_up_to_it_on_every_rank(name: str, hop: float) -> None:
    trace = played(name, 4, 8, times=(1, 1.5, 0.5), hop=hop)
    for rank, parts in enumerate(parts_of_ranks(trace)):
        assert sum(parts.values()) == pytest.approx(trace.makespan)
        assert parts[Part.COMPUTE] == pytest.approx(trace.busy[rank])
        assert (parts[Part.EXPOSED] > 0) == (hop > 0 and rank > 0) or hop > 0


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_stretches_follow_each_other_without_a_hole(name: str) -> None:
    trace = played(name, 4, 8, hop=0.25)
    for rank in stretches(trace):
        assert rank[0].start == pytest.approx(trace.start)
        assert rank[-1].end == pytest.approx(trace.start + trace.makespan)
        assert all(before.end == pytest.approx(after.start) for before, after in pairwise(rank))


def test_a_wait_is_a_bubble_until_the_value_is_sent_and_exposed_from_then_on() -> None:
    trace = measured(
        Event("0F0", 0, Lane.COMPUTE, 0.0, 4.0, 0, 0),
        Event("0SEND_F0>1", 0, Lane.SEND, 4.0, 4.5, 0, 0, peer=1),
        Event("1RECV_F0<0", 1, Lane.RECEIVE, 1.0, 6.0, 1, 0, after=1, peer=0),
        Event("1F0", 1, Lane.COMPUTE, 6.0, 9.0, 1, 0),
        windows=((0.0, 5.0), (0.5, 10.0)),
    )
    first, second = parts_of_ranks(trace)
    assert first == {**dict.fromkeys(Part, 0.0), Part.COMPUTE: 4, Part.EXPOSED: 0.5, Part.HOST: 0.5, Part.COOL_DOWN: 5}
    assert second[Part.WARM_UP] == 3
    assert second[Part.EXPOSED] == 2
    assert second[Part.COMPUTE] == 3
    assert second[Part.HOST] == pytest.approx(2)
    (idle,) = [each for each in stretches(trace)[1] if each.part is Part.WARM_UP]
    assert (idle.on, idle.on_rank) == ("0SEND_F0>1", 0)


def test_what_is_inside_of_an_instruction_is_taken_from_it() -> None:
    trace = measured(
        Event("0B0", 0, Lane.COMPUTE, 0.0, 10.0, 0, 0),
        Event("0B0", 0, Lane.RECOMPUTE, 1.0, 4.0, 0, 0),
        Event("all_reduce of ranks 0 1", 0, Lane.WAIT, 2.0, 3.0, -1, 0),
        windows=((0.0, 10.0),),
    )
    (parts,) = parts_of_ranks(trace)
    assert (parts[Part.COMPUTE], parts[Part.RECOMPUTATION], parts[Part.EXPOSED]) == (7, 2, 1)


def test_a_collective_is_waited_for_until_the_last_has_come_and_moves_from_then_on() -> None:
    trace = measured(
        Event("0B0", 0, Lane.COMPUTE, 0.0, 2.0, 0, 0),
        Event("the sum of the loss", 0, Lane.WAIT, 2.0, 7.0, -1, 0),
        Event("1B0", 1, Lane.COMPUTE, 0.0, 6.0, 1, 0),
        Event("the sum of the loss", 1, Lane.WAIT, 6.0, 7.0, -1, 0),
        windows=((0.0, 7.0), (0.0, 7.0)),
    )
    first, second = parts_of_ranks(trace)
    assert (first[Part.COOL_DOWN], first[Part.EXPOSED]) == (4, 1)
    assert (second[Part.COOL_DOWN], second[Part.EXPOSED]) == (0, 1)


def test_the_batch_and_the_optimizer_are_parts() -> None:
    trace = measured(
        Event("batch", 0, Lane.DATA, 0.0, 3.0, -1, 0),
        Event("0F0", 0, Lane.COMPUTE, 3.0, 5.0, 0, 0),
        Event("0STEP0", 0, Lane.STEP, 5.0, 9.0, 0, 0),
        Event("a sum of gradients", 0, Lane.WAIT, 5.0, 6.0, -1, 0, peer=1),
        windows=((0.0, 9.0),),
    )
    (parts,) = parts_of_ranks(trace)
    assert (parts[Part.DATA], parts[Part.COMPUTE], parts[Part.OPTIMIZER], parts[Part.EXPOSED]) == (3, 2, 3, 1)


def test_communication_beside_computation_is_hidden() -> None:
    trace = played("1f1b", 2, 4, hop=0.5)
    hidden, parts = hidden_of_ranks(trace), parts_of_ranks(trace)
    sent_to_first = sum(event.seconds for event in trace.events if event.lane is Lane.SEND and event.peer == 0)
    assert 0 < hidden[0] < sent_to_first
    assert hidden[0] + parts[0][Part.EXPOSED] + sum(parts[0][part] for part in BUBBLE) >= sent_to_first - 1e-9
    assert hidden_of_ranks(played("1f1b", 2, 4)) == (0.0, 0.0)


def test_a_collective_in_another_thread_is_hidden_while_the_rank_computes() -> None:
    trace = measured(
        Event("0B0", 0, Lane.COMPUTE, 0.0, 6.0, 0, 0),
        Event("a sum of gradients", 0, Lane.COLLECTIVE, 4.0, 9.0, -1, 0),
        windows=((0.0, 9.0),),
    )
    assert hidden_of_ranks(trace) == (2.0,)
