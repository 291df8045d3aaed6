"""What every generator owes: all the work, once, on the right rank, in an order that can be run."""

from collections import Counter
from collections.abc import Iterator

import pytest

from shardwise.errors import ShardwiseError
from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.generators.pipedream_2bw import pipedream_2bw
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.schedule import Schedule
from tests.schedule.playing import played_schedule, texts


def settings_of(name: str) -> Iterator[tuple[int, int, int | None]]:
    """Ranks, microbatches and chunks that a schedule allows: few, many, and numbers that do not divide each other."""
    entry = CATALOGUE[name]
    for num_ranks in (2, 4, 6) if entry.mirrored else (1, 2, 3, 5):
        counts = {1, 2, num_ranks - 1, num_ranks, num_ranks + 1, 2 * num_ranks - 1, 2 * num_ranks, 3 * num_ranks + 1}
        for num_microbatches in sorted(counts):
            if num_microbatches < max(1, entry.least_microbatches * num_ranks):
                continue
            if entry.mirrored and num_microbatches % 2:
                continue
            yield num_ranks, num_microbatches, None
    if entry.any_chunks_from is not None:
        for num_chunks in (2, 6) if entry.even_chunks else (1, 3, 4):
            for num_ranks, num_microbatches in ((1, 2), (2, 1), (3, 7), (4, 3), (4, 8)):
                yield num_ranks, num_microbatches, num_chunks


def check_work(schedule: Schedule) -> None:
    """Each stage does each microbatch of its pipe once forward and once backward, whole or in two parts."""
    done: Counter[Instruction] = Counter()
    for rank, order in enumerate(schedule.orders):
        for instruction in order:
            for part in instruction.parts:
                assert schedule.placement.ranks[part.stage] == rank, f"{part} stands on rank {rank}"
                if part.kind is Kind.B:
                    done[part._replace(kind=Kind.I)] += 1
                    done[part._replace(kind=Kind.W)] += 1
                elif part.kind is not Kind.STEP:
                    done[part] += 1
    wanted = {
        Instruction(kind, stage, microbatch): 1
        for microbatch in range(schedule.total_microbatches)
        for stage in schedule.placement.pipe(microbatch)
        for kind in (Kind.F, Kind.I, Kind.W)
    }
    assert done == wanted


@pytest.mark.parametrize("name", CATALOGUE)
def test_all_the_work_is_done_once_on_its_rank_and_nothing_gets_stuck(name: str) -> None:
    for num_ranks, num_microbatches, num_chunks in settings_of(name):
        schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
        assert schedule.name == name
        assert schedule.num_ranks == num_ranks
        assert schedule.num_microbatches == num_microbatches
        assert schedule.placement.num_chunks == (num_chunks or CATALOGUE[name].chunks)
        assert not schedule.communicates
        check_work(schedule)
        trace = played_schedule(schedule, (1, 1.25, 0.75), hop=0.125)
        assert trace.busy == pytest.approx([3 * schedule.total_microbatches] * num_ranks)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_stage_takes_its_microbatches_in_order(name: str) -> None:
    for num_ranks, num_microbatches, num_chunks in settings_of(name):
        schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
        last: dict[tuple[Kind, int], int] = {}
        for order in schedule.orders:
            for instruction in order:
                for part in instruction.parts:
                    key = (Kind.I if part.kind is Kind.B else part.kind, part.stage)
                    assert part.microbatch > last.get(key, -1), f"{part} comes late on {num_ranks} ranks"
                    last[key] = part.microbatch


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_same_question_has_the_same_answer(name: str) -> None:
    assert make_schedule(name, 4, 8) == make_schedule(name, 4, 8)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_pipedream_2bw_does_as_many_steps_as_asked(num_steps: int) -> None:
    schedule = pipedream_2bw(3, 4, num_steps)
    check_work(schedule)
    assert schedule.total_microbatches == 4 * num_steps
    for rank, order in enumerate(schedule.orders):
        steps = [str(instruction) for instruction in order if instruction.kind is Kind.STEP]
        assert steps == [f"{rank}STEP{step}" for step in range(num_steps)]


def test_1f1b_of_three_ranks_is_the_one_in_every_textbook() -> None:
    assert texts(make_schedule("1f1b", 3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zb_h1_puts_off_weight_gradients_by_as_many_microbatches_as_there_are_ranks_above() -> None:
    assert texts(make_schedule("zb-h1", 3, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


@pytest.mark.parametrize(
    ("asked", "problem", "remedy"),
    [
        (("1f1b", 0, 4, None), "0 stages: a pipeline has at least 1", "--stages 4"),
        (("1f1b", 4, 0, None), "0 microbatches: a step has at least 1", "--microbatches 8"),
        (("1f1b", 4, -3, None), "-3 microbatches: a step has at least 1", "--microbatches 8"),
        (
            ("dualpipe", 3, 8, None),
            "dualpipe needs an even number of stages, not 3: microbatches meet in the middle",
            "--stages 4",
        ),
        (
            ("chimera", 5, 8, None),
            "chimera needs an even number of stages, not 5: microbatches meet in the middle",
            "--stages 6",
        ),
        (
            ("dualpipe-v", 4, 7, None),
            "dualpipe-v over 4 stages needs at least 8 microbatches, not 7",
            "--microbatches 8",
        ),
        (
            ("pipedream-2bw", 4, 3, None),
            "pipedream-2bw over 4 stages needs at least 4 microbatches, not 3",
            "--microbatches 4",
        ),
        (
            ("chimera", 4, 5, None),
            "chimera needs an even number of microbatches, not 5: half enter at each end",
            "--microbatches 6",
        ),
        (
            ("1f1b", 4, 8, 2),
            "1f1b has 1 chunk on a rank, not 2",
            "--chunks 1, or a schedule that takes any number, like interleaved",
        ),
        (
            ("zb-v", 4, 8, 3),
            "zb-v has 2 chunks on a rank, not 3",
            "--chunks 2, or a schedule that takes any number, like interleaved",
        ),
        (("interleaved", 4, 8, 0), "interleaved takes chunks on a rank, 1 or more, not 0", "--chunks 2"),
        (("hanayo", 4, 8, 3), "hanayo takes an even number of chunks on a rank, 2 or more, not 3", "--chunks 4"),
    ],
)
def test_what_a_schedule_cannot_be_made_for_is_refused_with_what_it_can(
    asked: tuple[str, int, int, int | None], problem: str, remedy: str
) -> None:
    with pytest.raises(ShardwiseError) as caught:
        make_schedule(*asked)
    assert (caught.value.problem, caught.value.remedy) == (problem, remedy)


def test_an_unknown_schedule_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ShardwiseError, match="unknown schedule 'zbv'; known: gpipe, 1f1b, ") as caught:
        make_schedule("zbv", 4, 8)
    assert caught.value.remedy == "zb-v"
