"""What a user types about times, hops and memory, read as numbers; and what is said when it cannot be."""

from math import inf
from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError
from shardwise.schedule.placement import loop, vee
from shardwise.schedule.prices import StageTimes
from shardwise.schedule.question import Question, make_question, read_stage_times, read_times

UNEVEN = StageTimes(forward=1, input_gradient=1.2, weight_gradient=0.8)
SLOW = StageTimes(forward=1.5, input_gradient=2, weight_gradient=1)


def ask(num_ranks: int = 2, num_microbatches: int = 4, **more: object) -> Question:
    return make_question(num_ranks=num_ranks, num_microbatches=num_microbatches, **more)  # type: ignore[arg-type]


def file_of(folder: Path, text: str) -> Path:
    path = folder / "times.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_not_said_is_unit_times_no_hop_and_no_limit() -> None:
    question = ask(3)
    assert question.times == (StageTimes(),) * 3
    assert question.hops == ()
    assert question.memory == (inf,) * 3


@pytest.mark.parametrize("text", ["1,1.2,0.8", "1, 1.2, 0.8", "1 1.2 .8", "1;1.2;8e-1", " 1,1.2,0.8 "])
def test_times_may_be_set_apart_by_commas_semicolons_or_blanks(text: str) -> None:
    assert read_times(text) == UNEVEN


def test_the_time_of_a_pair_goes_with_the_times_of_its_halves() -> None:
    assert ask(times="1,1,1", pair=2).times[0].pair == 2


@pytest.mark.parametrize(
    "text",
    [
        "1,1.2,0.8\n1.5,2,1\n",
        "1 1.2 0.8\n1.5\t2\t1",
        "F,I,W\n1,1.2,0.8\n1.5,2,1\n",
        "f i w\n\n# the embedding\n1,1.2,0.8  # small\n1.5,2,1\n\n",
        "\ufeff1,1.2,0.8\r\n1.5,2,1\r\n",
        "[[1, 1.2, 0.8], [1.5, 2, 1]]",
        ' \n[{"F": 1, "I": 1.2, "W": 0.8}, {"W": 1, "I": 2, "F": 1.5}]',
        '[[1, "1.2", 0.8], {"F": 1.5, "I": 2, "W": 1}]',
    ],
)
def test_a_file_of_times_may_be_a_table_or_json(text: str, tmp_path: Path) -> None:
    assert read_stage_times(file_of(tmp_path, text), 2) == (UNEVEN, SLOW)


def test_a_file_may_have_times_of_each_stage_where_a_rank_has_several(tmp_path: Path) -> None:
    times = read_stage_times(file_of(tmp_path, "1,1,1\n2,2,2\n3,3,3\n4,4,4\n"), 2)
    assert [each.forward for each in times] == [1, 2, 3, 4]
    question = ask(stage_times=str(tmp_path / "times.csv"))
    assert question.prices(vee(2)) is not None


def test_one_hop_serves_every_boundary_and_several_are_for_each() -> None:
    assert ask(4, hop="0.1").hops == (0.1,)
    assert ask(4, hop="0.1,0,0.3").hops == (0.1, 0, 0.3)
    assert ask(1, hop="0.1").hops == (0.1,)


def test_one_limit_serves_every_rank_and_several_are_for_each() -> None:
    assert ask(3, memory="2.5").memory == (2.5, 2.5, 2.5)
    assert ask(3, memory="4,inf,2").memory == (4, inf, 2)
    assert ask(3, memory="inf").memory == (inf,) * 3


@pytest.mark.parametrize(
    ("asked", "problem", "remedy"),
    [
        ({"num_ranks": 0}, "0 stages: a pipeline has at least 1", "--stages 4"),
        ({"num_ranks": 1025}, "1025 stages: at most 1024 are played", "--stages 1024"),
        ({"num_microbatches": 0}, "0 microbatches: a step has at least 1", "--microbatches 4"),
        ({"num_chunks": 0}, "0 chunks: a rank has at least 1", "--chunks 2"),
        ({"times": "1,1"}, "--times: there are three times, F,I,W, but '1,1' has 2", "--times 1,1.2,0.8"),
        ({"times": ""}, "--times: there are three times, F,I,W, but '' has 0", "--times 1,1.2,0.8"),
        ({"times": "1,one,1"}, "--times: 'one' is not a number", "--times 1,1.2,0.8"),
        ({"times": "1,nan,1"}, "--times: 'nan' is not a number", "--times 1,1.2,0.8"),
        ({"times": "-1,1,1"}, "--times: -1 is below 0", "--times 1,1.2,0.8"),
        ({"times": "inf,1,1"}, "--times: inf is neither 0 nor between 1e-12 and 1e+12", "--times 1,1.2,0.8"),
        ({"times": "1,1e-300,1"}, "--times: 1e-300 is neither 0 nor between 1e-12 and 1e+12", "--times 1,1.2,0.8"),
        ({"times": "0,0,0"}, "--times: the times of F, I and W are all 0: nothing to schedule", "--times 1,1,1"),
        (
            {"pair": 5.0},
            "--times: an overlapped pair of 5 is not between its longer half, 2, and both together, 3",
            "--pair 2",
        ),
        (
            {"times": "1,1,1", "stage_times": "x"},
            "--times and --stage-times both say how long stages take",
            "only one of them",
        ),
        ({"hop": ""}, "--hop: '' is not a number", "--hop 0.05"),
        ({"hop": "-0.1"}, "--hop: -0.1 is below 0", "--hop 0.05"),
        (
            {"hop": "1,2"},
            "--hop has 2 times, but between 2 ranks the number of boundaries is 1",
            "--hop 0.05, or a time for each boundary",
        ),
        ({"memory": "much"}, "--memory: 'much' is not a number", "--memory 2, or a limit for each rank"),
        ({"memory": "1,2,3"}, "--memory has 3 limits for 2 ranks", "--memory 2, or a limit for each rank"),
        ({"memory": "-2"}, "--memory: -2 is below 0", "--memory 2, or a limit for each rank"),
        (
            {"kept_for_weights": 1.5},
            "the part of an activation kept for W is 1.5, but a part is between 0 and 1",
            "--kept-for-weights 1",
        ),
        ({"slowdown": -1.0}, "a slowdown of -1 is not between 0 and 100", "--slowdown 0.1"),
        ({"slowdown": float("nan")}, "a slowdown of nan is not between 0 and 100", "--slowdown 0.1"),
    ],
)
def test_what_cannot_be_is_told_with_the_number_and_what_to_type(
    asked: dict[str, object], problem: str, remedy: str
) -> None:
    with pytest.raises(ShardwiseError) as caught:
        ask(**asked)  # type: ignore[arg-type]
    assert (caught.value.problem, caught.value.remedy) == (problem, remedy)


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("", "times.csv has times for 0 stages, but there are 2 ranks", "2 lines like 1,1.2,0.8, one for each rank"),
        (
            "1,1,1\n",
            "times.csv has times for 1 stage, but there are 2 ranks",
            "2 lines like 1,1.2,0.8, one for each rank",
        ),
        ("1,1,1\n1,1\n", "times.csv, line 2: there are three times, F,I,W, but '1,1' has 2", "1,1.2,0.8"),
        ("# slow\n1,x,1\n", "times.csv, line 2: 'x' is not a number", "1,1.2,0.8"),
        ("1,1,1\n1,-2,1\n", "times.csv, line 2: -2 is below 0", "1,1.2,0.8"),
        (
            "1,1,1\n0,0,0\n",
            "times.csv, line 2: the times of F, I and W are all 0: nothing to schedule",
            "--times 1,1,1",
        ),
        ("[[1, 1, null]]", "times.csv, stage 0: 'None' is not a number", "1,1.2,0.8"),
        (
            "[[1, 1, 1], 5]",
            "times.csv, stage 1: 5 is not a list of times",
            '[1, 1.2, 0.8] or {"F": 1, "I": 1.2, "W": 0.8}',
        ),
        (
            '[{"F": 1, "B": 2}]',
            'times.csv, stage 0: {"F": 1, "B": 2} is not a list of times',
            '[1, 1.2, 0.8] or {"F": 1, "I": 1.2, "W": 0.8}',
        ),
        ('{"F": 1}', "times.csv is not a JSON list of times: it is one object", "[[1, 1.2, 0.8], [1, 1.2, 0.8]]"),
        (
            "[[1, 1",
            "times.csv is not a JSON list of times: Expecting ',' delimiter: line 1 column 7 (char 6)",
            "[[1, 1.2, 0.8], [1, 1.2, 0.8]]",
        ),
    ],
)
def test_what_is_wrong_in_a_file_of_times_is_told_with_its_line(
    text: str, problem: str, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(ShardwiseError) as caught:
        read_stage_times(file_of(tmp_path, text), 2)
    assert (caught.value.problem, caught.value.remedy) == (problem, remedy)


def test_json_nested_without_end_is_no_list_of_times(tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError, match=r"times.csv is not a JSON list of times: maximum recursion depth"):
        read_stage_times(file_of(tmp_path, "[" * 100_000), 2)


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file or directory"), (b"\xff\x00", "it is not text")])
def test_a_file_of_times_that_cannot_be_read_is_named(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ShardwiseError) as caught:
        read_stage_times(path, 4)
    assert caught.value.problem == f"the stage times in {path} cannot be read: {reason}"
    assert caught.value.remedy == "a file with 4 lines like 1,1.2,0.8"


def test_times_for_other_stages_than_a_schedule_has_are_refused(tmp_path: Path) -> None:
    question = ask(stage_times=str(file_of(tmp_path, "1,1,1\n" * 4)))
    with pytest.raises(ShardwiseError) as caught:
        question.prices(loop(2))
    assert caught.value.problem == "times are given for 4 stages, but the schedule has 2 stages on 2 ranks"
    assert caught.value.remedy == "a line of times for each rank, 2 in all"
