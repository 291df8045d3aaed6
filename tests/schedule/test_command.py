"""`shardwise schedule` as a user calls it: its numbers, its files, its drawings, its exit statuses."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardwise.cli import main
from shardwise.schedule.outcome import names
from tests.promises.processes import run_shardwise

NUMBERS = ("makespan", "span", "bubble", "peak_activations", "num_instructions")
FOUR_BY_EIGHT = "--stages 4 --microbatches 8"
DEADLOCK = "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0\n"


class Shardwise:
    """Runs `shardwise schedule` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def fails(self, words: str) -> str:
        """What is told on stderr."""
        assert main(["schedule", *words.split()]) == 1
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return captured.err

    def prints(self, words: str) -> str:
        assert main(["schedule", *words.split()]) == 0
        captured = self._capsys.readouterr()
        assert captured.err == ""
        return captured.out

    def answers(self, words: str) -> dict[str, object]:
        answer = json.loads(self.prints(f"{words} --json"))
        assert isinstance(answer, dict)
        return answer


@pytest.fixture
def shardwise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shardwise:
    monkeypatch.chdir(tmp_path)  # Where files are saved.
    return Shardwise(capsys)


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (f"zb-v {FOUR_BY_EIGHT}", {"makespan": 25.5, "span": 24, "bubble": 0, "peak_activations": [4, 4, 4, 4]}),
        (f"zb-h1 {FOUR_BY_EIGHT}", {"makespan": 27, "span": 27, "peak_activations": [4, 4, 4, 4]}),
        (f"zb-h1 {FOUR_BY_EIGHT} --kept-for-weights 0", {"peak_activations": [4, 3, 2, 1]}),
        (f"zb-h2 {FOUR_BY_EIGHT}", {"makespan": 27, "span": 24, "peak_activations": [7, 7, 7, 7]}),
        (f"1f1b {FOUR_BY_EIGHT}", {"makespan": 33, "span": 33, "peak_activations": [4, 3, 2, 1]}),
        (f"1f1b {FOUR_BY_EIGHT} --hop 0.1", {"makespan": 34.6}),
        (f"gpipe {FOUR_BY_EIGHT} --hop 0.1,0.1,0.1", {"makespan": 33.6}),
        (f"zb-v {FOUR_BY_EIGHT} --times 1,1.2,0.8", {"makespan": 25.8, "span": 25.2}),
        (f"interleaved {FOUR_BY_EIGHT} --chunks 4", {"makespan": 26.25, "num_chunks": 4}),
        ("dualpipe --stages 8 --microbatches 20 --pair 2", {"makespan": 52}),
        ("1f1b --stages 1 --microbatches 3", {"makespan": 9, "span": 9, "bubble": 0, "peak_activations": [1]}),
    ],
)
def test_the_numbers_are_those_that_others_computed(
    words: str, numbers: dict[str, object], shardwise: Shardwise
) -> None:
    answer = shardwise.answers(words)
    assert set(NUMBERS) <= set(answer)
    assert {key: answer[key] for key in numbers} == numbers


def test_instructions_are_counted_with_transfers_and_steps(shardwise: Shardwise) -> None:
    answer = shardwise.answers("1f1b --stages 2 --microbatches 4")
    # On each rank 4 F, 4 B and a step; 4 activations and 4 gradients are each sent and received.
    assert (answer["num_instructions"], answer["num_transfers"]) == (2 * 9 + 2 * 8, 8)


def test_two_weight_versions_are_measured_once_the_pipe_is_full(shardwise: Shardwise) -> None:
    answer = shardwise.answers(f"pipedream-2bw {FOUR_BY_EIGHT}")
    assert {key: answer[key] for key in ("makespan", "span", "bubble", "num_steps")} == {
        "makespan": 24,
        "span": 24,
        "bubble": 0,
        "num_steps": 3,
    }
    text = shardwise.prints(f"pipedream-2bw {FOUR_BY_EIGHT}")
    assert "a step, once the pipe is full, 24, span 24, bubble 0.0 %" in text
    assert "drawn: 3 steps, 81 in all" in text


@pytest.mark.parametrize("memory", [2.5, 3, 4])
def test_auto_keeps_to_the_memory(memory: float, shardwise: Shardwise) -> None:
    answer = shardwise.answers(f"auto {FOUR_BY_EIGHT} --times 1,1.2,0.8 --hop 0.05 --memory {memory}")
    peaks = answer["peak_activations"]
    assert isinstance(peaks, list)
    assert max(peaks) <= memory


def test_auto_is_no_slower_than_any_other_under_the_same_memory(shardwise: Shardwise) -> None:
    answer = shardwise.answers(f"--compare {FOUR_BY_EIGHT} --times 1,1.2,0.8 --hop 0.05 --memory 4")
    schedules = answer["schedules"]
    assert isinstance(schedules, list)
    # PipeDream-2BW has two weight versions, and so no flush to wait for.
    spans = {each["name"]: each["span"] for each in schedules if each["num_weight_copies"] == 1}
    assert min(spans, key=lambda name: spans[name]) == "auto"


def test_all_schedules_are_compared_or_left_out_with_the_reason(shardwise: Shardwise) -> None:
    answer = shardwise.answers(f"--compare {FOUR_BY_EIGHT}")
    schedules = answer["schedules"]
    assert isinstance(schedules, list)
    assert answer["refused"] == []
    assert sorted(each["name"] for each in schedules) == sorted(names())
    assert all(set(NUMBERS) <= set(each) for each in schedules)
    assert [each["span"] for each in schedules] == sorted(each["span"] for each in schedules)

    answer = shardwise.answers("--compare --stages 3 --microbatches 3 --memory 1.5")
    schedules, refused = answer["schedules"], answer["refused"]
    assert isinstance(schedules, list)
    assert isinstance(refused, list)
    assert sorted(each["name"] for each in [*schedules, *refused]) == sorted(names())
    why = {each["name"]: each["why"] for each in refused}
    assert why["1f1b"] == "1f1b holds 3 microbatch-stages on rank 0 at 0F2, but may hold 1.5 (1.5 too many)"
    assert why["chimera"] == "chimera needs an even number of stages, not 3: microbatches meet in the middle"


def test_a_comparison_is_a_table_with_the_reasons_below(shardwise: Shardwise) -> None:
    text = shardwise.prints("--compare --stages 1 --microbatches 1")
    assert text.startswith("1 stage, 1 microbatch, shortest span first\n\nschedule       makespan  span  bubble  holds")
    assert "left out dualpipe-v: dualpipe-v over 1 stage needs at least 2 microbatches, not 1\n" in text


def test_uneven_stages_are_read_from_a_file(shardwise: Shardwise) -> None:
    Path("times.csv").write_text("F,I,W\n1,1,1\n2,2,2  # the slow one\n1,1,1\n")
    words = "--stages 3 --microbatches 6 --stage-times times.csv"
    slow = shardwise.answers(f"1f1b {words}")
    ranks = slow["ranks"]
    assert isinstance(ranks, list)
    assert [rank["busy"] for rank in ranks] == [18, 36, 18]
    auto = shardwise.answers(f"auto {words}")
    assert float(str(auto["span"])) < float(str(slow["span"]))


def test_a_rank_says_why_it_idles_and_the_path_that_decides_is_named(shardwise: Shardwise) -> None:
    answer = shardwise.answers("gpipe --stages 2 --microbatches 1")
    none = dict.fromkeys(("warm-up", "cool-down", "waiting", "transfer", "collective"), 0)
    assert answer["ranks"] == [
        {"span": 6, "busy": 3, "idle": {**none, "waiting": 3}},
        {"span": 3, "busy": 3, "idle": {**none, "warm-up": 1, "cool-down": 2}},
    ]
    assert answer["critical_path"] == ["0F0", "1F0", "1B0", "0B0"]


def test_the_whole_answer_for_a_person(shardwise: Shardwise) -> None:
    assert shardwise.prints("1f1b --stages 2 --microbatches 2 --hop 0.5") == (
        "1f1b: 2 stages, 2 microbatches\n"
        "\n"
        "rank 0  F0 F1 .  .  .  B0--- .  B1---\n"
        "rank 1  .  . F0 B0--- F1 B1--- .  .\n"
        "\n"
        "F forward  B backward  I input gradient  W weight gradient  S step  fbiws second chunk  . idle\n"
        "\n"
        "makespan 10, span 10, bubble 40.0 %, 18 instructions\n"
        "critical path: 9 compute, 1 send, over ranks 0 1 0\n"
        "\n"
        "        busy  warm-up  cool-down  waiting  transfer\n"
        "rank 0     6        0          0        3         1\n"
        "rank 1     6      1.5        2.5        0         0\n"
        "\n"
        "activations held at most, in microbatch-stages\n"
        "rank 0  ======================================== 2\n"
        "rank 1  ==================== 1\n"
    )


def test_what_is_too_large_to_draw_is_not_drawn(shardwise: Shardwise) -> None:
    text = shardwise.prints("1f1b --stages 2 --microbatches 1600")
    assert "too many computations to draw here: --save FILE.svg, or FILE.json for Perfetto\n" in text
    assert len(text) < 2000


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v", "chimera", "pipedream-2bw", "auto"])
def test_a_saved_schedule_loads_again_with_the_same_numbers(name: str, shardwise: Shardwise) -> None:
    first = shardwise.answers(f"{name} {FOUR_BY_EIGHT} --save mine.schedule")
    assert shardwise.answers("mine.schedule") == first
    assert Path("mine.schedule").read_text().startswith(f"name: {name}\nmicrobatches: 8\n")


def test_a_loaded_schedule_is_played_against_other_times(shardwise: Shardwise) -> None:
    shardwise.prints(f"1f1b {FOUR_BY_EIGHT} --save mine")
    assert shardwise.answers("mine --hop 0.1")["makespan"] == 34.6
    assert shardwise.answers("./mine --hop 0.1")["makespan"] == 34.6


def test_a_drawing_is_saved_as_well_formed_svg(shardwise: Shardwise) -> None:
    text = shardwise.prints(f"zb-v {FOUR_BY_EIGHT} --save zb-v.svg")
    assert text.endswith("\nsaved zb-v.svg\n")
    root = ElementTree.parse("zb-v.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "zb-v: 4 stages, 8 microbatches" in "".join(root.itertext())


def test_a_trace_is_saved_for_perfetto(shardwise: Shardwise) -> None:
    shardwise.prints("1f1b --stages 2 --microbatches 2 --save trace.json --save TRACE.JSON")
    saved = json.loads(Path("trace.json").read_text())
    assert {"0F0", "1B1"} <= {event["name"] for event in saved["traceEvents"]}
    assert Path("TRACE.JSON").read_text() == Path("trace.json").read_text()


@pytest.mark.parametrize("bad", ["there/is/no.svg", "bad.pdf", "."])
def test_nothing_is_written_when_one_of_the_paths_is_bad(bad: str, shardwise: Shardwise) -> None:
    shardwise.fails(f"1f1b --stages 2 --microbatches 2 --save good.schedule --save good.svg --save {bad}")
    assert list(Path().iterdir()) == []


def test_a_file_that_was_there_stays_when_something_is_wrong(shardwise: Shardwise) -> None:
    Path("mine.schedule").write_text("precious")
    shardwise.fails("1f1b --stages 2 --microbatches 0 --save mine.schedule")
    shardwise.fails("1f1b --stages 2 --microbatches 2 --save mine.schedule --save none/x.svg")
    assert Path("mine.schedule").read_text() == "precious"
    shardwise.prints("1f1b --stages 2 --microbatches 2 --save mine.schedule")
    assert Path("mine.schedule").read_text().startswith("name: 1f1b\n")
    assert [path.name for path in Path().iterdir()] == ["mine.schedule"]


def test_a_file_that_deadlocks_is_drawn_with_the_place(shardwise: Shardwise) -> None:
    Path("stuck.schedule").write_text(DEADLOCK)
    assert shardwise.fails("stuck.schedule") == (
        "error: ranks wait for each other: rank 0 at 0B0 for 1B0 of rank 1, rank 1 at 1F1 for 0F1 of rank 0\n"
        "    rank 0  0RECV_B1<1 0RECV_B0<1 0F0 0SEND_F0>1 [0B0] 0F1 0SEND_F1>1 0B1 0STEP0\n"
        "    rank 1  1RECV_F0<0 1RECV_F1<0 [1F1] 1B1 1SEND_B1>0 1F0 1B0 ...\n"
        "  try: one of these instructions earlier\n"
    )


def test_a_mistake_is_told_in_json_where_json_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", "--stages", "0", "--microbatches", "8", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out) == {
        "error": {"problem": "0 stages: a pipeline has at least 1", "remedy": "--stages 4"}
    }


@pytest.mark.parametrize("name", names())
def test_the_smallest_pipelines_are_played_or_refused_in_a_sentence(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for stages, microbatches in ((1, 1), (1, 2), (2, 1), (3, 1), (5, 2)):
        words = ["schedule", name, "--stages", str(stages), "--microbatches", str(microbatches)]
        status = main(words)
        captured = capsys.readouterr()
        assert (status, captured.err[:7]) in ((0, ""), (1, "error: "))


@pytest.mark.parametrize(
    "words",
    [
        "1f1b --stages 4 --microbatches 8 --times 1e12,1e-12,0",
        "1f1b --stages 4 --microbatches 8 --times 0,0,1e-12",
        "zb-v --stages 4 --microbatches 8 --hop 1e12",
        "zb-v --stages 4 --microbatches 8 --hop 3 --slowdown 100",
        "auto --stages 2 --microbatches 2 --memory inf,1",
        "gpipe --stages 100 --microbatches 2",
        "interleaved --stages 2 --microbatches 2 --chunks 50",
    ],
)
def test_odd_but_possible_questions_are_answered(words: str, shardwise: Shardwise) -> None:
    assert "makespan" in shardwise.prints(words)
    shardwise.answers(f"{words} --save odd.svg --save odd.json")


def test_run_as_a_program_it_answers_in_json() -> None:
    finished = run_shardwise("schedule", "zb-v", *FOUR_BY_EIGHT.split(), "--json")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert json.loads(finished.stdout)["makespan"] == 25.5


def test_run_as_a_program_it_draws_in_colour_only_where_asked() -> None:
    words = ("schedule", "1f1b", "--stages", "2", "--microbatches", "2")
    plain, coloured = run_shardwise(*words), run_shardwise(*words, FORCE_COLOR="1")
    assert "\x1b" not in plain.stdout
    assert "\x1b[" in coloured.stdout


def test_run_as_a_program_a_mistake_is_a_sentence_and_exit_status_1(tmp_path: Path) -> None:
    path = tmp_path / "stuck.schedule"
    path.write_text(DEADLOCK)
    finished = run_shardwise("schedule", str(path))
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith("error: ranks wait for each other: rank 0 at 0B0")
    assert "Traceback" not in finished.stderr
