"""The verifier: every kind of mistake with its text and its drawing, and nothing that is right refused."""

import pickle
from collections.abc import Sequence

import pytest

from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.instruction import Instruction, Kind, parse
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.passes.offload import insert_offloads
from shardwise.schedule.placement import Placement
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.text import read_schedule
from shardwise.schedule.verify import InvalidScheduleError, peak_held, verify
from tests.schedule.playing import texts, written
from tests.schedule.variants import NAMES, SETTINGS, variants

#: What is wrong, the schedule, and the whole error: the reason, the drawing with the place in brackets, the remedy.
MISTAKES = [
    (
        "an instruction on the wrong rank",
        """
stages: 0 1
rank 0: 0F0 1F0 1B0 0B0
rank 1:
""",
        """
rank 0: 1F0 is of stage 1, which lies on rank 1
    rank 0  0F0 [1F0] 1B0 0B0
    rank 1
  try: 1F0 in the line of rank 1
""",
    ),
    (
        "a stage that there is not",
        """
stages: 0 1
rank 0: 0F0 0B0
rank 1: 1F0 2F0 1B0
""",
        """
rank 1: 2F0 is of stage 2, but the last is 1
    rank 0  0F0 0B0
    rank 1  1F0 [2F0] 1B0
  try: drop 2F0, or correct its numbers
""",
    ),
    (
        "a microbatch that there is not",
        """
microbatches: 1
rank 0: 0F0 0F1 0B0
""",
        """
rank 0: 0F1 is of microbatch 1, but the last is 0
    rank 0  0F0 [0F1] 0B0
  try: drop 0F1, or correct its numbers
""",
    ),
    (
        "a step that there is not",
        """
rank 0: 0F0 0B0 0STEP1
""",
        """
rank 0: 0STEP1 is of step 1, but the last step is 0
    rank 0  0F0 0B0 [0STEP1]
  try: drop 0STEP1, or correct its numbers
""",
    ),
    (
        "a tie that a stage is not in",
        """
ties: 0+1
rank 0: 0F0 1F0 2F0 2B0 1B0 0B0 2REDUCE0~0
""",
        """
rank 0: 2REDUCE0~0 names tie 0, to which stage 2 does not belong
    rank 0  ... 1F0 2F0 2B0 1B0 0B0 [2REDUCE0~0]
  try: drop 2REDUCE0~0, or correct its numbers
""",
    ),
    (
        "a microbatch that goes another way",
        """
pipes: 0 1 | 2 3
stages: 0 1 1 0
microbatches: 2
rank 0: 0F0 0F1 3F1 3B1 0B0
rank 1: 1F0 2F1 2B1 1B0
""",
        """
rank 0: 0F1 is of microbatch 1, which does not go through stage 0
    rank 0  0F0 [0F1] 3F1 3B1 0B0
    rank 1  1F0 2F1 2B1 1B0
  try: drop 0F1, or correct its numbers
""",
    ),
    (
        "a transfer between stages that are no neighbours",
        """
rank 0: 0F0 0SEND_F0>2 0B0
rank 1: 1F0 1B0
rank 2: 2F0 2B0
""",
        """
rank 0: 0SEND_F0>2 names stage 2, but no value goes between stages 0 and 2 that way
    rank 0  0F0 [0SEND_F0>2] 0B0
    rank 1  1F0 1B0
    rank 2  2F0 2B0
  try: drop 0SEND_F0>2, or correct its numbers
""",
    ),
    (
        "a microbatch that is nowhere",
        """
microbatches: 3
rank 0: 0F0 0F1 0B0 0B1
""",
        """
microbatch 2 never goes forward (microbatches: 3)
    rank 0  0F0 0F1 0B0 0B1
  try: 0F2 in the line of rank 0
""",
    ),
    (
        "a forward done twice",
        """
rank 0: 0F0 0F0 0B0
""",
        """
rank 0: 0F0 does again what 0F0 has done
    rank 0  [0F0] [0F0] 0B0
  try: drop 0F0
""",
    ),
    (
        "a weight gradient done twice",
        """
rank 0: 0F0 0B0 0W0
""",
        """
rank 0: 0W0 does again what 0B0 has done
    rank 0  0F0 [0B0] [0W0]
  try: drop 0W0
""",
    ),
    (
        "a forward left out",
        """
rank 0: 0F0 0B0
rank 1: 1B0
""",
        """
rank 1: the forward of microbatch 0 on stage 1 is never computed
    rank 0  0F0 0B0
    rank 1  [1B0]
  try: 1F0 in the line of rank 1
""",
    ),
    (
        "an input gradient left out",
        """
rank 0: 0F0 0W0
""",
        """
rank 0: the input gradient of microbatch 0 on stage 0 is never computed
    rank 0  [0F0] [0W0]
  try: 0I0 in the line of rank 0
""",
    ),
    (
        "a weight gradient left out",
        """
rank 0: 0F0 0F1 0B0 0I1
""",
        """
rank 0: the weight gradient of microbatch 1 on stage 0 is never computed
    rank 0  0F0 [0F1] 0B0 [0I1]
  try: 0W1 in the line of rank 0
""",
    ),
    (
        "a receive left out",
        """
rank 0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0
rank 1: 1F0 1B0 1SEND_B0>0
""",
        """
rank 1: 1F0 needs 1RECV_F0<0, which no rank does
    rank 0  0F0 0SEND_F0>1 0RECV_B0<1 0B0
    rank 1  [1F0] 1B0 1SEND_B0>0
  try: 1RECV_F0<0 in the line of rank 1
""",
    ),
    (
        "a send left out",
        """
rank 0: 0F0 0RECV_B0<1 0B0
rank 1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0
""",
        """
rank 1: 1RECV_F0<0 needs 0SEND_F0>1, which no rank does
    rank 0  0F0 0RECV_B0<1 0B0
    rank 1  [1RECV_F0<0] 1F0 1B0 1SEND_B0>0
  try: 0SEND_F0>1 in the line of rank 0
""",
    ),
    (
        "a value sent and never received",
        """
stages: 0 1 1
rank 0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0
rank 1: 1RECV_F0<0 1F0 1SEND_F0>2 2F0 2B0 1B0 1SEND_B0>0
""",
        """
rank 1: 1SEND_F0>2 is never received
    rank 0  0F0 0SEND_F0>1 0RECV_B0<1 0B0
    rank 1  1RECV_F0<0 1F0 [1SEND_F0>2] 2F0 2B0 1B0 1SEND_B0>0
  try: 2RECV_F0<1 in the line of rank 1
""",
    ),
    (
        "a reload left out",
        """
rank 0: 0F0 0OFFLOAD0 0B0
""",
        """
rank 0: 0B0 needs 0RELOAD0, which no rank does
    rank 0  0F0 0OFFLOAD0 [0B0]
  try: 0RELOAD0 in the line of rank 0
""",
    ),
    (
        "an offload left out",
        """
rank 0: 0F0 0RELOAD0 0B0
""",
        """
rank 0: 0RELOAD0 needs 0OFFLOAD0, which no rank does
    rank 0  0F0 [0RELOAD0] 0B0
  try: 0OFFLOAD0 in the line of rank 0
""",
    ),
    (
        "a step left out that the next one needs",
        """
steps: 2
rank 0: 0F0 0B0 0F1 0B1
""",
        """
rank 0: 0F1 needs 0STEP0, which no rank does
    rank 0  0F0 0B0 [0F1] 0B1
  try: 0STEP0 in the line of rank 0
""",
    ),
    (
        "a backward before its forward",
        """
rank 0: 0B0 0F0
""",
        """
rank 0: 0B0 needs 0F0, which comes only after it
    rank 0  [0B0] [0F0]
  try: 0F0 before 0B0
""",
    ),
    (
        "a use before its receive",
        """
rank 0: 0F0 0SEND_F0>1 0B0 0RECV_B0<1
rank 1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0
""",
        """
rank 0: 0B0 needs 0RECV_B0<1, which comes only after it
    rank 0  0F0 0SEND_F0>1 [0B0] [0RECV_B0<1]
    rank 1  1RECV_F0<0 1F0 1B0 1SEND_B0>0
  try: 0RECV_B0<1 before 0B0
""",
    ),
    (
        "a step before its last gradient",
        """
rank 0: 0F0 0F1 0B0 0STEP0 0B1
""",
        """
rank 0: 0STEP0 needs 0B1, which comes only after it
    rank 0  0F0 0F1 0B0 [0STEP0] [0B1]
  try: 0B1 before 0STEP0
""",
    ),
    (
        "receives in another order than their sends",
        """
rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0RECV_B1<1 0B0 0B1
rank 1: 1RECV_F1<0 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0
""",
        """
ranks 0 and 1: 0SEND_F0>1 meets 1RECV_F1<0, for a link keeps its order
    rank 0  0F0 [0SEND_F0>1] 0F1 0SEND_F1>1 0RECV_B0<1 0RECV_B1<1 ...
    rank 1  [1RECV_F1<0] 1RECV_F0<0 1F0 1B0 1SEND_B0>0 ...
  try: receives in the order of their sends
""",
    ),
    (
        "two ranks that wait for each other",
        """
rank 0: 0F0 0B0 0F1 0B1
rank 1: 1F1 1B1 1F0 1B0
""",
        """
ranks wait for each other: rank 0 at 0B0 for 1B0 of rank 1, rank 1 at 1F1 for 0F1 of rank 0
    rank 0  0F0 [0B0] 0F1 0B1
    rank 1  [1F1] 1B1 1F0 1B0
  try: one of these instructions earlier
""",
    ),
    (
        "two ranks that wait for each other's transfers",
        """
rank 0: 0RECV_B0<1 0RECV_B1<1 0F0 0SEND_F0>1 0B0 0F1 0SEND_F1>1 0B1
rank 1: 1RECV_F0<0 1RECV_F1<0 1F1 1F0 1B0 1SEND_B0>0 1B1 1SEND_B1>0
""",
        """
ranks wait for each other: rank 0 at 0B0 for 1B0 of rank 1, rank 1 at 1F1 for 0F1 of rank 0
    rank 0  0RECV_B0<1 0RECV_B1<1 0F0 0SEND_F0>1 [0B0] 0F1 0SEND_F1>1 0B1
    rank 1  1RECV_F0<0 1RECV_F1<0 [1F1] 1F0 1B0 1SEND_B0>0 1B1 ...
  try: one of these instructions earlier
""",
    ),
    (
        "three of four ranks",
        """
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1
rank 2: 2F0 2F1 2B0 2B1
rank 3: 3F1 3F0 3B0 3B1
""",
        """
ranks wait for each other: rank 1 at 1B0 for 2B0 of rank 2, rank 2 at 2F1 for 1F1 of rank 1
    rank 0  0F0 0F1 0B0 0B1
    rank 1  1F0 [1B0] 1F1 1B1
    rank 2  2F0 [2F1] 2B0 2B1
    rank 3  3F1 3F0 3B0 3B1
  try: one of these instructions earlier
""",
    ),
    (
        "tied weights that never meet",
        """
ties: 0+2
rank 0: 0F0 0B0 0STEP0
rank 1: 1F0 1B0 1STEP0
rank 2: 2F0 2B0 2STEP0
""",
        """
rank 0: 0STEP0 steps on weights shared with stage 2 before their gradients have met
    rank 0  0F0 0B0 [0STEP0]
    rank 1  1F0 1B0 1STEP0
    rank 2  2F0 2B0 2STEP0
  try: 0REDUCE0~0 before 0STEP0
""",
    ),
    (
        "tied weights that meet too late",
        """
ties: 0+1
rank 0: 0F0 1F0 1B0 0B0 1REDUCE0~0 1STEP0 0STEP0 0REDUCE0~0
""",
        """
rank 0: 0STEP0 needs 0REDUCE0~0, which comes only after it
    rank 0  ... 1F0 1B0 0B0 1REDUCE0~0 1STEP0 [0STEP0] [0REDUCE0~0]
  try: 0REDUCE0~0 before 0STEP0
""",
    ),
    (
        "a step that one stage does not take",
        """
rank 0: 0F0 0B0 0STEP0
rank 1: 1F0 1B0
""",
        """
rank 0 does 0STEP0, but rank 1 never does 1STEP0
    rank 0  0F0 0B0 [0STEP0]
    rank 1  1F0 1B0
  try: 1STEP0 in the line of rank 1
""",
    ),
    (
        "a reduction that one stage does not come to",
        """
ties: 0+1
rank 0: 0F0 0B0 0REDUCE0~0
rank 1: 1F0 1B0
""",
        """
rank 0 does 0REDUCE0~0, but rank 1 never does 1REDUCE0~0
    rank 0  0F0 0B0 [0REDUCE0~0]
    rank 1  1F0 1B0
  try: 1REDUCE0~0 in the line of rank 1
""",
    ),
    (
        "ties met in different orders",
        """
ties: 0+2 1+3
stages: 0 0 1 1
rank 0: 0F0 1F0 1B0 0B0 0REDUCE0~0 1REDUCE0~1
rank 1: 2F0 3F0 3B0 2B0 3REDUCE0~1 2REDUCE0~0
""",
        """
reductions wait for each other: rank 1 does 3REDUCE0~1 before 2REDUCE0~0; rank 0 does 0REDUCE0~0 before 1REDUCE0~1
    rank 0  0F0 1F0 1B0 0B0 [0REDUCE0~0] [1REDUCE0~1]
    rank 1  2F0 3F0 3B0 2B0 [3REDUCE0~1] [2REDUCE0~0]
  try: tied reductions in one order on all ranks
""",
    ),
    (
        "a stage gathered twice",
        """
rank 0: 0GATHER0 0F0 0GATHER1 0B0 0RELEASE1
""",
        """
rank 0: 0GATHER1 gathers stage 0, which is gathered already
    rank 0  0GATHER0 0F0 [0GATHER1] 0B0 0RELEASE1
  try: 0RELEASE0 before 0GATHER1
""",
    ),
    (
        "a release of what is not gathered",
        """
rank 0: 0GATHER0 0F0 0RELEASE0 0GATHER1 0B0 0RELEASE1 0RELEASE2
""",
        """
rank 0: 0RELEASE2 releases what is not gathered
    rank 0  ... 0F0 0RELEASE0 0GATHER1 0B0 0RELEASE1 [0RELEASE2]
  try: 0GATHER2 before 0RELEASE2
""",
    ),
    (
        "a use of what is not gathered",
        """
rank 0: 0GATHER0 0F0 0RELEASE0 0B0
""",
        """
rank 0: 0B0 uses the parameters of stage 0, which are not gathered
    rank 0  0GATHER0 0F0 0RELEASE0 [0B0]
  try: a GATHER of stage 0 before 0B0
""",
    ),
    (
        "a stage gathered and never released",
        """
rank 0: 0GATHER0 0F0 0B0
""",
        """
rank 0: 0GATHER0 is never released
    rank 0  [0GATHER0] 0F0 0B0
  try: 0RELEASE0 behind its last use
""",
    ),
]


@pytest.mark.parametrize(("schedule", "error"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_a_mistake_is_named_drawn_and_given_a_remedy(schedule: str, error: str) -> None:
    with pytest.raises(InvalidScheduleError) as caught:
        verify(read_schedule(schedule, source="x"))
    assert str(caught.value) == error.strip("\n")


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_passes_in_every_form(name: str, num_ranks: int, num_microbatches: int) -> None:
    for schedule in variants(name, num_ranks, num_microbatches).values():
        verify(schedule)


@pytest.mark.parametrize("kind", [Kind.F, Kind.I, Kind.W])
def test_every_microbatch_must_go_through_every_stage_once(kind: Kind) -> None:
    schedule = make_schedule("zb-v", 2, 3)
    for rank, order in enumerate(schedule.orders):
        for position, instruction in enumerate(order):
            if instruction.kind is not kind:
                continue
            without = replaced(schedule, rank, [*order[:position], *order[position + 1 :]])
            with pytest.raises(InvalidScheduleError, match=r"is never computed|never goes forward"):
                verify(without)
            twice = replaced(schedule, rank, [*order, instruction])
            with pytest.raises(InvalidScheduleError, match=f"{instruction} does again what {instruction} has done"):
                verify(twice)


def replaced(schedule: Schedule, rank: int, order: Sequence[Instruction]) -> Schedule:
    """The schedule with another order of one rank."""
    return schedule.with_orders([order if each == rank else old for each, old in enumerate(schedule.orders)])


def with_a_skip() -> Schedule:
    plain = make_schedule("1f1b", 3, 4)
    return lower(written(plain.placement.with_skips((0, 2)), *texts(plain), num_microbatches=4))


def test_a_value_that_skips_a_stage_is_sent_and_received_both_ways() -> None:
    schedule = with_a_skip()
    verify(schedule)
    assert parse("2RECV_F0<0") in schedule.orders[2]
    assert parse("0RECV_B0<2") in schedule.orders[0]


@pytest.mark.parametrize(("rank", "receive", "user"), [(2, "2RECV_F1<0", "2F1"), (0, "0RECV_B1<2", "0B1")])
def test_a_skip_that_is_not_received_is_refused(rank: int, receive: str, user: str) -> None:
    schedule = with_a_skip()
    order = [each for each in schedule.orders[rank] if str(each) != receive]
    with pytest.raises(InvalidScheduleError, match=f"rank {rank}: {user} needs {receive}, which no rank does"):
        verify(replaced(schedule, rank, order))


def test_a_rank_may_hold_what_it_holds_and_no_less() -> None:
    schedule = lower(make_schedule("1f1b", 4, 8))
    verify(schedule, memory=[4, 3, 2, 1])
    with pytest.raises(InvalidScheduleError) as caught:
        verify(schedule, memory=[4, 2.5, 2, 1])
    assert str(caught.value) == (
        "1f1b holds 3 microbatch-stages on rank 1 at 1F2, but may hold 2.5 (0.5 too many)\n"
        "    rank 0  0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1 0RECV_B0<1 0F3 0SEND_F3>1 0RECV_B1<1 ...\n"
        "    rank 1  ... 1F0 1SEND_F0>2 1F1 1SEND_F1>2 1RECV_B0<2 [1F2] 1SEND_F2>2 1RECV_B1<2 1B0 1SEND_B0>0 ...\n"
        "    rank 2  2RECV_F0<1 2RECV_F1<1 2RECV_F2<1 2F0 2SEND_F0>3 2RECV_B0<3 2F1 2SEND_F1>3 2RECV_B1<3 2B0 ...\n"
        "    rank 3  3RECV_F0<2 3RECV_F1<2 3F0 3B0 3SEND_B0>2 3RECV_F2<2 3F1 3B1 3SEND_B1>2 3RECV_F3<2 ...\n"
        "  try: --memory 4, or auto, which makes a schedule for the memory there is"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_that_the_remedy_names_is_the_smallest_that_fits(name: str) -> None:
    schedule = lower(make_schedule(name, 4, 8))
    with pytest.raises(InvalidScheduleError) as caught:
        verify(schedule, memory=[0.25] * 4)
    remedy = caught.value.remedy
    assert remedy is not None
    smallest = float(remedy.removeprefix("--memory ").partition(",")[0])
    verify(schedule, memory=[smallest] * 4)
    with pytest.raises(InvalidScheduleError):
        verify(schedule, memory=[smallest - 0.01] * 4)


def test_offloaded_activations_are_not_held() -> None:
    schedule = make_schedule("gpipe", 2, 4)
    away = insert_offloads(schedule, which=lambda each: each.microbatch == 2)
    assert [peak_held(schedule, 0)[0], peak_held(away, 0)[0]] == [4, 3]
    verify(lower(away), memory=[3, 3])


def test_where_an_activation_is_freed_by_its_input_gradient_less_is_held() -> None:
    schedule = lower(make_schedule("zb-h1", 4, 8))
    verify(schedule, memory=[4, 3, 2, 1], kept_for_weights=0)
    with pytest.raises(InvalidScheduleError, match=r"zb-h1 holds 4 microbatch-stages on rank 1 at 1F\d"):
        verify(schedule, memory=[4, 3, 2, 1])


def test_of_many_ranks_only_those_at_fault_are_drawn() -> None:
    schedule = make_schedule("1f1b", 20, 2)
    order = list(schedule.orders[17])
    with pytest.raises(InvalidScheduleError) as caught:
        verify(replaced(schedule, 17, order[::-1]))
    assert caught.value.problem.splitlines()[1:] == ["    rank 17  [17B1] 17B0 [17F1] 17F0"]


def test_ranks_of_two_digits_are_drawn_under_each_other() -> None:
    schedule = make_schedule("gpipe", 12, 1)
    with pytest.raises(InvalidScheduleError) as caught:
        verify(replaced(schedule, 11, []))
    lines = caught.value.problem.splitlines()[1:]
    assert lines[9:] == ["    rank 9   9F0 9B0", "    rank 10  10F0 10B0", "    rank 11"]


def test_a_long_order_is_drawn_around_the_place() -> None:
    schedule = make_schedule("gpipe", 1, 30)
    order = list(schedule.orders[0])
    with pytest.raises(InvalidScheduleError) as caught:
        verify(replaced(schedule, 0, [order[30], *order[:30], *order[31:]]))
    assert caught.value.problem == (
        "rank 0: 0B0 needs 0F0, which comes only after it\n    rank 0  [0B0] [0F0] 0F1 0F2 0F3 0F4 ..."
    )
    with pytest.raises(InvalidScheduleError) as caught:
        verify(replaced(schedule, 0, [order[59], *order[:59]]))
    assert caught.value.problem == (
        "rank 0: 0B29 needs 0F29, which comes only after it\n"
        "    rank 0  [0B29] 0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0F8 0F9 0F10 ... "
        "0F22 0F23 0F24 0F25 0F26 0F27 0F28 [0F29] 0B0 0B1 0B2 0B3 ..."
    )


def test_counts_far_beyond_what_is_there_are_answered_at_once() -> None:
    text = "microbatches: 999999999\nsteps: 999999\nrank 0: 0F0 0B0 0STEP0"
    with pytest.raises(InvalidScheduleError, match="microbatch 1 never goes forward"):
        verify(read_schedule(text))


def test_both_stages_of_a_tie_may_lie_on_one_rank() -> None:
    plain = make_schedule("zb-v", 2, 4)
    placement = plain.placement.with_ties((0, 3), (1, 2))
    verify(lower(written(placement, *texts(plain), num_microbatches=4)))


def test_a_tie_may_have_more_than_two_stages() -> None:
    placement = Placement(ranks=(0, 1, 2), pipes=((0, 1, 2),)).with_ties((0, 1, 2))
    plain = make_schedule("zb-h1", 3, 4)
    schedule = lower(written(placement, *texts(plain), num_microbatches=4))
    verify(schedule)
    order = [each for each in schedule.orders[1] if each.kind is not Kind.REDUCE]
    with pytest.raises(InvalidScheduleError, match="1STEP0 steps on weights shared with stages 0 and 2 before"):
        verify(replaced(schedule, 1, order))


def test_an_error_comes_through_from_another_process_as_it_is() -> None:
    with pytest.raises(InvalidScheduleError) as caught:
        verify(read_schedule("rank 0: 0B0 0F0"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, InvalidScheduleError)
    assert str(again) == str(caught.value)
