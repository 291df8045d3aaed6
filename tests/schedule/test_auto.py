"""`auto`: the figures that it promises, and that it is never over its memory and never slower than a named schedule."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.schedule.auto.search import auto
from shardwise.schedule.catalogue import CATALOGUE, check, make_schedule
from shardwise.schedule.prices import StageTimes
from shardwise.schedule.question import Question
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import simulate
from shardwise.trace.events import Trace
from shardwise.trace.memory import peaks
from tests.schedule.playing import UNIT, Times, stage_times

#: What the figures are asked for: times as in a transformer, and a hop.
TYPICAL: Times = (1, 1.2, 0.8)
HOP = 0.05

#: Those that hold one model and one version of its weights, as `auto` does.
NAMES = [entry.name for entry in CATALOGUE.values() if entry.num_weight_copies == 1 and entry.name != "pipedream-2bw"]


def asked(
    num_ranks: int,
    num_microbatches: int,
    memory: float | tuple[float, ...],
    *,
    times: Times = TYPICAL,
    of_each: tuple[StageTimes, ...] = (),
    hop: float = HOP,
    max_chunks: int = 2,
) -> Question:
    """A question: one memory for all ranks or one for each; times for all ranks, or `of_each` rank or stage."""
    return Question(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        times=of_each or (stage_times(times),) * num_ranks,
        hops=(hop,),
        memory=memory if isinstance(memory, tuple) else (memory,) * num_ranks,
        num_chunks=max_chunks,
    )


def played_for(question: Question, schedule: Schedule) -> Trace:
    return simulate(schedule, question.prices(schedule.placement))


def keeps_to(question: Question, trace: Trace) -> bool:
    return all(peak <= limit + 1e-9 for peak, limit in zip(peaks(trace), question.memory, strict=True))


def answered(question: Question) -> Trace:
    """The answer, played, which must be within its memory."""
    trace = played_for(question, auto(question))
    assert keeps_to(question, trace), f"{peaks(trace)} is more than {question.memory}"
    return trace


def named_spans(question: Question) -> dict[str, float]:
    """The spans of all named schedules that keep to the memory."""
    spans = {}
    for name in NAMES:
        try:
            check(CATALOGUE[name], question.num_ranks, question.num_microbatches, None)
        except ShardwiseError:
            continue
        trace = played_for(question, make_schedule(name, question.num_ranks, question.num_microbatches))
        if keeps_to(question, trace):
            spans[name] = trace.span
    return spans


# The figures


@pytest.mark.parametrize("num_ranks", [4, 8, pytest.param(16, marks=pytest.mark.whole)])
def test_with_twice_the_memory_of_1f1b_there_is_next_to_no_bubble(num_ranks: int) -> None:
    assert answered(asked(num_ranks, 3 * num_ranks, 2 * num_ranks)).bubble <= 0.015


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_with_the_memory_of_1f1b_it_is_no_worse_than_the_best_of_zb_h1_and_zb_v(num_ranks: int) -> None:
    question = asked(num_ranks, 3 * num_ranks, num_ranks)
    spans = named_spans(question)
    assert answered(question).span <= min(spans["zb-h1"], spans["zb-v"]) + 1e-9


@pytest.mark.parametrize(
    ("num_ranks", "limits"), [(4, (2, 2.5, 3, 3.5, 4)), pytest.param(8, (4, 6.5, 8), marks=pytest.mark.whole)]
)
def test_more_memory_between_v_mins_and_that_of_1f1b_is_never_slower(num_ranks: int, limits: tuple[float, ...]) -> None:
    assert limits[0] == (num_ranks + 4) // 3
    assert limits[-1] == num_ranks
    spans = [answered(asked(num_ranks, 3 * num_ranks, limit)).span for limit in limits]
    assert all(more <= less + 1e-9 for less, more in pairwise(spans))
    assert spans[-1] < spans[0]


@pytest.mark.parametrize(("num_ranks", "slow"), [(4, 0), (4, 1), (4, 3), (8, 0), (8, 4)])
def test_one_slow_stage_sets_the_pace_and_nothing_else_costs_more_than_a_twentieth(num_ranks: int, slow: int) -> None:
    times = [stage_times(TYPICAL)] * num_ranks
    times[slow] = stage_times((1.5, 1.8, 1.2))
    question = asked(num_ranks, 4 * num_ranks, 2 * num_ranks, of_each=tuple(times))
    assert answered(question).span <= 1.05 * 4 * num_ranks * 4.5


@pytest.mark.parametrize(("num_ranks", "limit"), [(4, 3.5), pytest.param(8, 6, marks=pytest.mark.whole)])
def test_between_the_memory_of_v_half_and_of_1f1b_it_is_faster_than_every_named_schedule(
    num_ranks: int, limit: float
) -> None:
    question = asked(num_ranks, 3 * num_ranks, limit)
    spans = named_spans(question)
    assert "v-half" in spans
    assert answered(question).span < min(spans.values()) - 0.5


# What holds for every question


@st.composite
def questions(draw: st.DrawFn) -> Question:
    num_ranks = draw(st.integers(min_value=1, max_value=5))
    num_microbatches = draw(st.integers(min_value=1, max_value=2 * num_ranks + 2))
    lengths = st.integers(min_value=1, max_value=8).map(lambda quarters: quarters / 4)
    return Question(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        times=tuple(stage_times((draw(lengths), draw(lengths), draw(lengths))) for _ in range(num_ranks)),
        hops=tuple(draw(st.sampled_from([0.0, 0.125, 0.5, 1.0])) for _ in range(num_ranks - 1)),
        memory=tuple(draw(st.integers(min_value=2, max_value=4 * num_ranks)) / 2 for _ in range(num_ranks)),
        kept_for_weights=draw(st.sampled_from([0.0, 0.5, 1.0])),
        num_chunks=draw(st.sampled_from([1, 2])),
    )


@settings(max_examples=15, deadline=None)
@given(questions())
def test_it_keeps_to_the_memory_of_each_rank_and_no_named_schedule_that_does_is_faster(question: Question) -> None:
    schedule = auto(question)
    trace = answered(question)
    most = question.num_chunks or 2
    assert schedule.placement.num_chunks <= most
    spans = {name: span for name, span in named_spans(question).items() if CATALOGUE[name].chunks <= most}
    assert trace.span <= min(spans.values(), default=trace.span) + 1e-9
    assert trace.span >= question.num_microbatches * max(times.total for times in question.times) - 1e-9


def test_it_is_no_slower_than_dualpipe_v_where_pairs_overlap() -> None:
    times = (stage_times(UNIT, pair=2),) * 4
    question = asked(4, 8, 8, of_each=times, hop=0)
    assert answered(question).span <= named_spans(question)["dualpipe-v"]


def test_every_rank_keeps_to_its_own_memory() -> None:
    question = asked(4, 12, (6, 2, 3, 1.5))
    answered(question)


def test_the_same_question_has_the_same_answer() -> None:
    question = asked(4, 12, 3.5)
    assert auto(question) == auto(question)


def test_the_answer_is_called_auto_and_has_computation_only() -> None:
    schedule = auto(asked(3, 5, 2.5))
    assert schedule.name == "auto"
    assert not schedule.communicates
    assert schedule.num_microbatches == 5


def test_one_chunk_is_all_there_is_where_no_more_is_allowed() -> None:
    question = asked(4, 12, 4, max_chunks=1)
    schedule = auto(question)
    assert schedule.placement.num_chunks == 1
    assert auto(asked(4, 12, 4)).placement.num_chunks == 2
    spans = named_spans(question)
    assert answered(question).span <= min(spans["1f1b"], spans["zb-h1"]) + 1e-9


def test_the_plateau_of_one_chunk_begins_where_the_first_gradient_is_back() -> None:
    """At ((p - 1)(I + 2 hop) + p F) / F microbatches, less a part of one: with F = I = W at 2p - 1, and exactly there.

    With other times that number is where the first rank need not pause, and a little more still helps the others.
    """
    for num_ranks in (2, 4, 6):
        spans = {
            limit: answered(asked(num_ranks, 3 * num_ranks, limit, times=UNIT, hop=0, max_chunks=1)).span
            for limit in (2 * num_ranks - 2, 2 * num_ranks - 1, 3 * num_ranks)
        }
        assert spans[2 * num_ranks - 1] == spans[3 * num_ranks] == 9 * num_ranks
        assert spans[2 * num_ranks - 2] > 9 * num_ranks


def test_times_may_be_given_for_each_of_two_stages_a_rank() -> None:
    # Down the V stages cost 0.5 each way, up they cost 1, and the last has the loss.
    light, heavy = stage_times((0.5, 0.5, 0.5)), stage_times((1, 1, 1))
    question = asked(4, 12, 4, of_each=(light,) * 4 + (heavy,) * 3 + (stage_times((1.5, 1, 1)),), hop=0)
    schedule = auto(question)
    assert schedule.placement.num_stages == 8
    trace = answered(question)
    heaviest = 12 * (1.5 + 3.5)
    assert heaviest <= trace.span <= 1.15 * heaviest


@pytest.mark.parametrize(
    ("memory", "problem"),
    [
        ((4, 0.5, 4, 4), "rank 1 may hold 0.5 microbatch-stages, but every schedule holds 1"),
        ((0, 1, 1, 1), "rank 0 may hold 0 microbatch-stages, but every schedule holds 1"),
        ((2, 2, 2, -1), "rank 3 may hold -1 microbatch-stages, but every schedule holds 1"),
    ],
)
def test_memory_for_less_than_one_microbatch_is_refused_with_the_least_that_will_do(
    memory: tuple[float, ...], problem: str
) -> None:
    with pytest.raises(ShardwiseError) as caught:
        auto(asked(4, 8, memory))
    assert caught.value.problem == problem
    assert caught.value.remedy == "--memory 1"


def test_memory_for_one_microbatch_is_enough() -> None:
    assert answered(asked(3, 4, 1, times=UNIT, hop=0)).makespan <= 4 * 9
