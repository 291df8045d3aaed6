"""The file form of a schedule: what is printed is read back, what is left out is found, what is wrong is told."""

from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.instruction import Kind
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.placement import Placement, loop, mirrored, vee
from shardwise.schedule.text import load_schedule, print_schedule, read_schedule
from tests.schedule.playing import texts, written
from tests.schedule.variants import NAMES, SETTINGS, variants

KEYS = "known: name, microbatches, stages, pipes, skips, ties, steps, staleness, rank 0"
KINDS = "known: F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, GATHER, RELEASE, REDUCE, STEP, OFFLOAD, RELOAD"
TWO_RANKS = "rank 0: 0F0 0B0\nrank 1: 1F0 1B0\n"


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_is_read_back_in_every_form(name: str, num_ranks: int, num_microbatches: int) -> None:
    for form, schedule in variants(name, num_ranks, num_microbatches).items():
        assert read_schedule(print_schedule(schedule)) == schedule, form


def test_skips_and_ties_are_read_back() -> None:
    plain = make_schedule("zb-h1", 4, 5)
    placement = plain.placement.with_skips((0, 2), (1, 3)).with_ties((0, 3))
    schedule = lower(written(placement, *texts(plain), num_microbatches=5))
    text = print_schedule(schedule)
    assert "skips: 0>2 1>3\nties: 0+3\n" in text
    assert read_schedule(text) == schedule


def test_a_pipe_that_does_not_go_through_the_stages_in_order_is_read_back() -> None:
    schedule = written(Placement(ranks=(0, 1), pipes=((1, 0),)), "0F0 0B0", "1F0 1B0")
    assert read_schedule(print_schedule(schedule)) == schedule


def test_two_weight_versions_are_printed_with_their_steps() -> None:
    assert print_schedule(make_schedule("pipedream-2bw", 2, 2)) == (
        "name: pipedream-2bw\n"
        "microbatches: 2\n"
        "stages: 0 1\n"
        "steps: 3\n"
        "staleness: 1\n"
        "\n"
        "rank 0: 0F0 0F1 0B0 0F2 0B1 0STEP0 0F3 0B2 0F4 0B3 0STEP1 0F5 0B4 0B5 0STEP2\n"
        "rank 1: 1F0 1B0 1F1 1B1 1STEP0 1F2 1B2 1F3 1B3 1STEP1 1F4 1B4 1F5 1B5 1STEP2\n"
    )


def test_a_model_held_twice_is_printed_with_its_pipes_and_ties() -> None:
    header, _, _ = print_schedule(make_schedule("chimera", 2, 2)).partition("\n\n")
    assert header == "name: chimera\nmicrobatches: 2\nstages: 0 1 1 0\npipes: 0 1 | 2 3\nties: 0+2 1+3"


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved", "zb-v", "dualpipe-v", "hanayo"])
def test_with_one_pipe_the_ranks_alone_are_enough(name: str) -> None:
    schedule = make_schedule(name, 2, 4)
    _, _, ranks = print_schedule(schedule).partition("\n\n")
    assert read_schedule(ranks, source=f"{name}.schedule") == schedule


def test_without_microbatches_those_of_all_steps_are_shared_out() -> None:
    schedule = make_schedule("pipedream-2bw", 2, 3)
    text = print_schedule(schedule).replace("microbatches: 3\n", "")
    assert read_schedule(text).num_microbatches == 3


def test_without_stages_a_stage_lies_where_its_instructions_stand() -> None:
    assert read_schedule("rank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0").placement == vee(2)


def test_both_halves_of_a_pair_say_where_their_stages_lie() -> None:
    schedule = read_schedule("rank 0: 0F0&1B0 0B0 1F0")
    assert schedule.placement == loop(1, 2)
    assert schedule.orders[0][0].beside is not None


def test_without_a_name_it_is_called_as_its_file_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.schedule"
    path.write_text(TWO_RANKS)
    assert load_schedule(path).name == "mine"
    path.write_text(f"name:\n{TWO_RANKS}")
    assert load_schedule(path).name == "mine"


def test_comments_blank_lines_and_the_order_of_lines_do_not_matter() -> None:
    text = """
        # A schedule by hand.
        rank 1:   1F0 1B0   # the last stage

        rank  0:  0F0 0B0
        stages: 0 1         # one each
        name: by hand
    """
    assert read_schedule(text) == written(loop(2), "0F0 0B0", "1F0 1B0")


def test_a_file_from_an_editor_that_marks_its_encoding_is_read(tmp_path: Path) -> None:
    path = tmp_path / "marked.schedule"
    path.write_bytes(b"\xef\xbb\xbfname: marked\r\nrank 0: 0F0 0B0\r\n")
    assert load_schedule(path) == read_schedule("name: marked\nrank 0: 0F0 0B0\n")


def test_pipes_are_read_with_their_ties() -> None:
    text = "microbatches: 2\nstages: 0 1 1 0\npipes: 0 1 | 2 3\nties: 0+2 1+3\nrank 0: 0F0 3F1\nrank 1: 1F0 2F1\n"
    assert read_schedule(text).placement == mirrored(2)


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        (
            "",
            "x: ranks must be numbered from 0 without a gap; found: none",
            "a line 'rank 0: 0F0 0F1 0B0 0B1', and one for each other rank",
        ),
        (
            "rank 0: 0F0\nrank 2: 1F0",
            "x: ranks must be numbered from 0 without a gap; found: 0, 2",
            "a line 'rank 0: 0F0 0F1 0B0 0B1', and one for each other rank",
        ),
        ("hello world", "x, line 1: 'hello world' has no ':' after its key", "rank 0: 0F0 0F1 0B0 0B1"),
        ("\n\nmikrobatches: 1", f"x, line 3: unknown key 'mikrobatches'; {KEYS}", "microbatches"),
        ("Rank 0: 0F0", f"x, line 1: unknown key 'Rank 0'; {KEYS}", "rank 0"),
        ("§: 0F0", f"x, line 1: unknown key '§'; {KEYS}", "rank 0: 0F0 0F1 0B0 0B1"),
        (f"{'k' * 99}: 1", f"x, line 1: unknown key '{'k' * 40}...'; {KEYS}", "rank 0: 0F0 0F1 0B0 0B1"),
        ("rank 0: 0F0\nrank 0: 0B0", "x, line 2: 'rank 0' has a line already", "one line 'rank 0: ...'"),
        ("steps: 1\nsteps: 2", "x, line 2: 'steps' has a line already", "one line 'steps: ...'"),
        (
            "rank 0: 0F0 0G0",
            f"x, line 1, rank 0, instruction 2: unknown instruction 'G'; {KINDS}",
            "2F0, 1I3, 0SEND_F2>1 or 2STEP0",
        ),
        (
            "rank 0: 0F0 0STEPS0",
            f"x, line 1, rank 0, instruction 2: unknown instruction 'STEPS'; {KINDS}",
            "STEP",
        ),
        (
            "name: a\nrank 0: F0",
            "x, line 2, rank 0, instruction 1: 'F0' is not an instruction: it must be a stage, a kind and a microbatch",
            "2F0, 1I3, 0SEND_F2>1, 1RECV_F2<0, 4F3&3B1 or 2STEP0",
        ),
        (
            f"rank 0: 0F{'1' * 5000}",
            f"x, line 1, rank 0, instruction 1: '0F{'1' * 38}...' is not an instruction: it must be a stage, a kind "
            "and a microbatch",
            "2F0, 1I3, 0SEND_F2>1, 1RECV_F2<0, 4F3&3B1 or 2STEP0",
        ),
        (
            "rank 0: 0F0&1F0",
            "x, line 1, rank 0, instruction 1: '0F0&1F0' pairs F with F, but a pair is a forward beside a backward",
            "a pair like 4F3&3B1",
        ),
        (
            "rank 0: 0SEND_F0",
            "x, line 1, rank 0, instruction 1: '0SEND_F0': SEND_F names its peer stage after '>'",
            "0SEND_F0>1",
        ),
        (
            "rank 0:",
            "x: stages must be numbered from 0 without a gap, but stage 0 has no instruction",
            "rank 0: 0F0 0F1 0B0 0B1",
        ),
        (
            "rank 0: 0F0 99999999999F0",
            "x: stages must be numbered from 0 without a gap, but stage 1 has no instruction",
            "rank 0: 0F0 0F1 0B0 0B1",
        ),
        (
            f"stages: 0 0\n{TWO_RANKS}",
            "x: rank 1 has a line but holds no stage",
            "a line 'rank 1: ...' and a stage for it",
        ),
        (
            f"stages: 0 1 2\n{TWO_RANKS}",
            "x: rank 2 holds a stage but has no line",
            "a line 'rank 2: ...' and a stage for it",
        ),
        (f"stages: 0 b\n{TWO_RANKS}", "x, line 1: '0 b' are not ranks", "stages: 0 1 2 3"),
        (
            f"pipes: 0 7\n{TWO_RANKS}",
            "x, line 1: pipes must be equally long and have each of the 2 stages once",
            "pipes: 0 1 | 2 3",
        ),
        (f"pipes: 0 > 1\n{TWO_RANKS}", "x, line 1: '0 > 1' are not stages", "pipes: 0 1 | 2 3"),
        (f"skips: 0\n{TWO_RANKS}", "x, line 1: '0' are not stages", "skips: 0>2 1>3"),
        (
            f"skips: 1>0\n{TWO_RANKS}",
            "x, line 1: a skip from stage 1 to stage 0 does not go to a later stage of 2",
            "skips: 0>2 1>3",
        ),
        (
            f"ties: 0+9\n{TWO_RANKS}",
            "x, line 1: tie (0, 9) must name two or more different stages of 0 to 1",
            "ties: 0+3",
        ),
        (f"ties: 0-1\n{TWO_RANKS}", "x, line 1: '0-1' are not stages", "ties: 0+3"),
        (
            f"microbatches: 0\n{TWO_RANKS}",
            "x, line 1: microbatches must be a whole number from 1 to 999999999, not '0'",
            "microbatches: 8",
        ),
        (
            f"steps: two\n{TWO_RANKS}",
            "x, line 1: steps must be a whole number from 1 to 999999999, not 'two'",
            "steps: 3",
        ),
        (
            f"staleness: -1\n{TWO_RANKS}",
            "x, line 1: staleness must be a whole number from 0 to 999999999, not '-1'",
            "staleness: 1",
        ),
        (
            "rank 0: 0F99999999999",
            "x: microbatches must be a whole number from 1 to 999999999, not '100000000000'",
            "microbatches: 8",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_what_to_write(text: str, problem: str, remedy: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        read_schedule(text, source="x")
    assert (caught.value.problem, caught.value.remedy) == (problem, remedy)


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file or directory"), (b"\xff\xfe", "it is not text")])
def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.schedule"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ShardwiseError) as caught:
        load_schedule(path)
    assert caught.value.problem == f"the schedule file {path} cannot be read: {reason}"
    assert caught.value.remedy == (
        "shardwise schedule 1f1b --stages 4 --microbatches 8 --save 1f1b.schedule, which writes one"
    )


def test_a_folder_is_no_schedule_file(tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError, match="cannot be read: Is a directory"):
        load_schedule(tmp_path)


def test_every_kind_of_instruction_comes_back_from_a_file() -> None:
    order = "0GATHER0 0F0 0OFFLOAD0 0RELOAD0 0I0 0W0 0RELEASE0 0F1 0B1 0REDUCE0~0 0REDUCE0 0STEP0"
    transfers = "0SEND_F0>1 0RECV_B0<1"
    schedule = written(loop(2).with_ties((0, 1)), f"{order} {transfers}", "1RECV_F0<0 1SEND_B0>0", num_microbatches=2)
    assert read_schedule(print_schedule(schedule)) == schedule
    assert {each.kind for rank in schedule.orders for each in rank} == set(Kind)
