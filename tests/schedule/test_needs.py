"""Each line of the relation, on schedules of a few instructions: who must have finished before whom."""

import pytest

from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.generators.pipedream_2bw import pipedream_2bw
from shardwise.schedule.instruction import Kind
from shardwise.schedule.needs import Needs
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.placement import loop, mirrored, vee
from shardwise.schedule.schedule import Schedule
from tests.schedule.playing import written


def needed_by(schedule: Schedule, text: str) -> list[str]:
    """What the instruction waits for, sorted by its text."""
    needs = Needs(schedule)
    node = [str(instruction) for instruction in needs.nodes].index(text)
    return sorted(str(needs.nodes[before]) for before in needs.before[node])


def missing(schedule: Schedule) -> list[tuple[str, str]]:
    needs = Needs(schedule)
    return [(str(needs.nodes[node]), str(instruction)) for node, instruction in needs.missing]


def test_a_forward_needs_the_forward_before_it() -> None:
    schedule = written(loop(2), "0F0", "1F0")
    assert needed_by(schedule, "0F0") == []
    assert needed_by(schedule, "1F0") == ["0F0"]


def test_a_forward_needs_the_receive_where_transfers_are_written_out() -> None:
    schedule = written(loop(2), "0F0 0SEND_F0>1", "1RECV_F0<0 1F0")
    assert needed_by(schedule, "0SEND_F0>1") == ["0F0"]
    assert needed_by(schedule, "1RECV_F0<0") == ["0SEND_F0>1"]
    assert needed_by(schedule, "1F0") == ["1RECV_F0<0"]


def test_a_backward_needs_its_own_forward_and_the_backward_behind_it() -> None:
    schedule = written(loop(2), "0F0 0B0", "1F0 1B0")
    assert needed_by(schedule, "1B0") == ["1F0"]
    assert needed_by(schedule, "0B0") == ["0F0", "1B0"]


def test_a_backward_needs_no_weight_gradient_of_the_stage_behind_it() -> None:
    schedule = written(loop(2), "0F0 0I0 0W0", "1F0 1I0 1W0")
    assert needed_by(schedule, "0I0") == ["0F0", "1I0"]
    assert needed_by(schedule, "0W0") == ["0I0"]


def test_a_backward_needs_the_received_gradient_where_transfers_are_written_out() -> None:
    schedule = written(loop(2), "0F0 0SEND_F0>1 0RECV_B0<1 0I0", "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0")
    assert needed_by(schedule, "1SEND_B0>0") == ["1I0"]
    assert needed_by(schedule, "0RECV_B0<1") == ["1SEND_B0>0"]
    assert needed_by(schedule, "0I0") == ["0F0", "0RECV_B0<1"]


def test_what_stays_on_a_rank_is_not_received() -> None:
    schedule = written(vee(1), "0F0 1F0 1B0 0B0")
    assert needed_by(schedule, "1F0") == ["0F0"]
    lowered = lower(make_schedule("zb-v", 2, 3))
    assert needed_by(lowered, "2F0") == ["1F0"]
    assert needed_by(lowered, "1I0") == ["1F0", "2I0"]
    assert needed_by(lowered, "1F0") == ["1RECV_F0<0"]


def test_a_skipped_value_is_needed_forward_and_its_gradient_backward() -> None:
    placement = loop(3).with_skips((0, 2))
    schedule = written(placement, "0F0 0B0", "1F0 1B0", "2F0 2B0")
    assert needed_by(schedule, "2F0") == ["0F0", "1F0"]
    assert needed_by(schedule, "0B0") == ["0F0", "1B0", "2B0"]
    assert needed_by(schedule, "1B0") == ["1F0", "2B0"]


def test_a_skipped_value_is_received_from_where_it_was_made() -> None:
    lowered = lower(written(loop(3).with_skips((0, 2)), "0F0 0B0", "1F0 1B0", "2F0 2B0"))
    assert needed_by(lowered, "2F0") == ["2RECV_F0<0", "2RECV_F0<1"]
    assert needed_by(lowered, "2RECV_F0<0") == ["0SEND_F0>2"]
    assert needed_by(lowered, "0B0") == ["0F0", "0RECV_B0<1", "0RECV_B0<2"]


def test_a_pair_needs_what_both_its_halves_need_and_makes_what_both_make() -> None:
    schedule = written(vee(1), "0F0 1F0 0F1&1B0 1F1&0B0 1B1 0B1", num_microbatches=2)
    assert needed_by(schedule, "0F1&1B0") == ["1F0"]
    assert needed_by(schedule, "1F1&0B0") == ["0F0", "0F1&1B0", "0F1&1B0"]
    assert needed_by(schedule, "1B1") == ["1F1&0B0"]
    needs = Needs(schedule)
    assert needs.find(Kind.F, 0, 1) == needs.find(Kind.I, 1, 0) == needs.find(Kind.W, 1, 0) == 2


def test_a_pair_with_an_input_gradient_makes_no_weight_gradient() -> None:
    schedule = written(vee(1), "0F0 1F0 0F1&1I0 1W0 0B0", num_microbatches=2)
    needs = Needs(schedule)
    assert needs.find(Kind.W, 1, 0) == 3
    assert needed_by(schedule, "1W0") == ["0F1&1I0"]


def test_a_full_backward_is_found_as_both_of_its_parts() -> None:
    needs = Needs(written(loop(1), "0F0 0B0"))
    assert needs.find(Kind.I, 0, 0) == needs.find(Kind.W, 0, 0) == 1
    assert needs.find(Kind.F, 0, 1) is None


def test_a_step_needs_every_weight_gradient_of_its_stage_and_its_reductions() -> None:
    schedule = written(loop(1), "0F0 0F1 0B0 0I1 0W1 0REDUCE0 0STEP0", num_microbatches=2)
    assert needed_by(schedule, "0REDUCE0") == ["0B0", "0W1"]
    assert needed_by(schedule, "0STEP0") == ["0B0", "0REDUCE0", "0W1"]


def test_a_step_of_one_chunk_needs_nothing_of_another() -> None:
    schedule = written(vee(1), "0F0 1F0 1B0 1STEP0 0B0 0STEP0")
    assert needed_by(schedule, "1STEP0") == ["1B0"]
    assert needed_by(schedule, "0STEP0") == ["0B0"]


def test_the_reduction_of_a_tie_needs_the_weight_gradients_of_all_its_stages() -> None:
    placement = loop(2).with_ties((0, 1))
    schedule = written(placement, "0F0 0B0 0REDUCE0~0 0STEP0", "1F0 1B0 1REDUCE0~0 1STEP0")
    assert needed_by(schedule, "1REDUCE0~0") == ["0B0", "1B0"]
    assert needed_by(schedule, "0REDUCE0~0") == ["0B0", "1B0"]
    assert needed_by(schedule, "1STEP0") == ["1B0", "1REDUCE0~0"]


def test_the_copies_of_a_mirrored_stage_each_need_only_their_own_microbatches() -> None:
    schedule = lower(make_schedule("chimera", 2, 2))
    assert needed_by(schedule, "0REDUCE0~0") == ["0B0", "2B1"]
    assert missing(schedule) == []


def test_a_step_is_of_its_own_microbatches_only() -> None:
    schedule = written(loop(1), "0F0 0B0 0STEP0 0F1 0B1 0STEP1", num_steps=2)
    assert needed_by(schedule, "0STEP0") == ["0B0"]
    assert needed_by(schedule, "0STEP1") == ["0B1"]


def test_a_forward_needs_the_step_before_it() -> None:
    schedule = written(loop(1), "0F0 0B0 0STEP0 0F1 0B1 0STEP1", num_steps=2)
    assert needed_by(schedule, "0F0") == []
    assert needed_by(schedule, "0F1") == ["0STEP0"]
    assert needed_by(schedule, "0B1") == ["0F1"]


def test_with_two_weight_versions_a_forward_needs_the_step_before_the_last() -> None:
    schedule = pipedream_2bw(2, 2, 4)
    assert needed_by(schedule, "0F3") == []
    assert needed_by(schedule, "0F4") == ["0STEP0"]
    assert needed_by(schedule, "1F6") == ["0F6", "1STEP1"]
    assert missing(schedule) == []


def test_whatever_computes_needs_the_last_gather_of_its_stage() -> None:
    schedule = written(vee(1), "0GATHER0 0F0 0RELEASE0 1GATHER0 1F0 1B0 0GATHER1 0I0 0W0")
    assert needed_by(schedule, "0F0") == ["0GATHER0"]
    assert needed_by(schedule, "1B0") == ["1F0", "1GATHER0"]
    assert needed_by(schedule, "0I0") == ["0F0", "0GATHER1", "1B0"]
    assert needed_by(schedule, "0W0") == ["0GATHER1", "0I0"]
    assert needed_by(schedule, "0GATHER1") == []
    assert needed_by(schedule, "0RELEASE0") == []


def test_both_halves_of_a_pair_need_their_stages_gathered() -> None:
    schedule = written(vee(1), "0GATHER0 1GATHER0 0F0 1F0 0F1&1B0", num_microbatches=2)
    assert needed_by(schedule, "0F1&1B0") == ["0GATHER0", "1F0", "1GATHER0"]


def test_an_offloaded_microbatch_is_reloaded_before_its_backward() -> None:
    schedule = written(loop(1), "0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0", num_microbatches=2)
    assert needed_by(schedule, "0OFFLOAD0") == ["0F0"]
    assert needed_by(schedule, "0RELOAD0") == ["0OFFLOAD0"]
    assert needed_by(schedule, "0B0") == ["0F0", "0RELOAD0"]
    assert needed_by(schedule, "0B1") == ["0F1"]


def test_an_input_gradient_beside_a_forward_needs_its_reload_too() -> None:
    schedule = written(vee(1), "0F0 1F0 1OFFLOAD0 1RELOAD0 0F1&1I0", num_microbatches=2)
    assert needed_by(schedule, "0F1&1I0") == ["1F0", "1RELOAD0"]


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        (("0B0", ""), [("0B0", "0F0"), ("0B0", "1I0")]),
        (("", "1F0"), [("1F0", "0F0")]),
        (("0F0 0W0", ""), [("0W0", "0I0")]),
        (("0SEND_F0>1", "1RECV_F0<0 1F0"), [("0SEND_F0>1", "0F0")]),
        (("0F0", "1RECV_F0<0 1F0"), [("1RECV_F0<0", "0SEND_F0>1")]),
        (("0F0 0SEND_F0>1", "1F0"), [("1F0", "1RECV_F0<0")]),
        (("0F0 0STEP0", ""), [("0STEP0", "0W0")]),
        (("0F0 0RELOAD0", ""), [("0RELOAD0", "0OFFLOAD0")]),
        (("0F0 0OFFLOAD0 0B0", "1F0 1B0"), [("0B0", "0RELOAD0")]),
    ],
)
def test_what_nobody_makes_is_named(orders: tuple[str, str], expected: list[tuple[str, str]]) -> None:
    assert missing(written(loop(2), *orders)) == expected


def test_the_missing_half_of_a_pair_is_named() -> None:
    schedule = written(vee(1), "0F0 0F1&1B0", num_microbatches=2)
    assert missing(schedule) == [("0F1&1B0", "1F0")]


def test_a_step_names_every_microbatch_that_it_lacks_though_none_is_numbered_so_high() -> None:
    schedule = written(loop(1), "0F0 0B0 0STEP0", num_microbatches=3)
    assert missing(schedule) == [("0STEP0", "0W1"), ("0STEP0", "0W2")]


def test_a_missing_step_is_named() -> None:
    schedule = written(loop(1), "0F0 0B0 0F1 0B1", num_steps=2)
    assert missing(schedule) == [("0F1", "0STEP0")]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("0F0 0F0", [(1, 0)]),
        ("0F0 0B0 0W0", [(2, 1)]),
        ("0F0 0I0 0B0", [(2, 1)]),
        ("0F0 0I0 0W0 0B0", [(3, 1), (3, 2)]),
        ("0F0 0B0 0STEP0 0STEP0", [(3, 2)]),
        ("0F0 0I0 0W0", []),
    ],
)
def test_what_is_done_twice_is_named_with_where_it_was_done_before(order: str, expected: list[tuple[int, int]]) -> None:
    assert Needs(written(loop(1), order)).repeated == expected


def test_a_pair_that_repeats_a_backward_is_named() -> None:
    schedule = written(vee(1), "0F0 1F0 1B0 0F1&1B0", num_microbatches=2)
    assert Needs(schedule).repeated == [(3, 2), (3, 2)]


def test_nodes_are_numbered_rank_by_rank() -> None:
    needs = Needs(written(loop(2), "0F0 0B0", "1F0 1B0"))
    assert needs.first_node == [0, 2]
    assert needs.rank == [0, 0, 1, 1]
    assert [str(node) for node in needs.nodes] == ["0F0", "0B0", "1F0", "1B0"]


def test_a_rank_with_nothing_to_do_has_no_nodes() -> None:
    needs = Needs(written(loop(3), "0F0", "", "2F0"))
    assert needs.first_node == [0, 1, 1]
    assert missing(needs.schedule) == [("2F0", "1F0")]


@pytest.mark.parametrize("name", CATALOGUE)
def test_no_named_schedule_misses_or_repeats_anything(name: str) -> None:
    for schedule in (make_schedule(name, 4, 8), lower(make_schedule(name, 4, 8))):
        needs = Needs(schedule)
        assert not needs.missing
        assert not needs.repeated


def test_a_mirrored_pipe_reads_nothing_of_the_other() -> None:
    schedule = written(mirrored(2), "0F0 3F1", "1F0 2F1", num_microbatches=2)
    assert needed_by(schedule, "1F0") == ["0F0"]
    assert needed_by(schedule, "2F1") == []
    assert needed_by(schedule, "3F1") == ["2F1"]
