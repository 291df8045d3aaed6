import json
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.trace.file import save_trace
from tests.explain.doctor.patients import as_measured, played


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plan_is_simulated_and_its_page_and_perfetto_trace_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "pp=2,microbatches=4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["page"] == "report.html"
    assert Path("report.html").stat().st_size == answer["page_bytes"]
    assert len(json.loads(Path("report.perfetto.json").read_text())["traceEvents"]) > 16
    assert (answer["step"], answer["num_ranks"]) == (15, 2)
    assert sum(answer["parts"][0].values()) == pytest.approx(15)


def test_the_page_of_a_run_lies_in_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    save_trace(as_measured(played("1f1b", 2, 4)), Path("run/trace.json"))
    Path("run/plan.toml").write_text('pp = 2\n[reasons]\npp = "two <devices>"\n')
    assert main(["report", "run"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("run: a step of 15 s on 2 ranks\n")
    assert "rank 1" in told
    assert "two &lt;devices&gt;" in Path("run/report.html").read_text()


def test_two_runs_go_on_one_page() -> None:
    assert main(["report", "pp=2,schedule=zb-h1,microbatches=4", "pp=2,microbatches=4", "--save", "both.html"]) == 0
    assert "Two runs compared" in Path("both.html").read_text()
    assert Path("both.perfetto.json").is_file()


@pytest.mark.parametrize(
    ("words", "problem", "remedy"),
    [
        (["report", "nowhere"], "there is no run at nowhere", "shardwise profile"),
        (["report", "pp=two"], "pp=two in the plan wants a whole number", "pp=2"),
        (["report", "pp=2,schedule=auto,microbatches=4"], "is found for the times of a real run", "zb-v"),
        (["report", "pp=2,microbatches=4", "--save", "no/where.html"], "there is no folder no", "mkdir -p no"),
        (["doctor", "nowhere"], "there is no run at nowhere", "shardwise profile"),
    ],
)
def test_what_cannot_be_shown_is_told(
    words: list[str], problem: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    told = capsys.readouterr().err
    assert problem in told
    assert remedy in told


def test_a_folder_without_a_trace_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["report", "empty"]) == 1
    assert "the folder empty has no trace.json" in capsys.readouterr().err


def test_a_measured_run_and_a_plan_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    save_trace(as_measured(played("1f1b", 2, 4)), Path("step.json"))
    assert main(["report", "step.json", "pp=2,microbatches=4"]) == 1
    assert "cannot be compared: one is in seconds, the other simulated" in capsys.readouterr().err


def test_the_doctor_tells_what_it_found_and_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "pp=4,microbatches=8"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("pp=4,microbatches=8: 1 finding\n\n1. ranks idle for want of input for 27.3 % of the step\n")
    assert "   try: schedule=zb-v\n   predicted gain: 7.5 F, 22.7 % of the step\n" in told


def test_the_doctor_answers_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "pp=4,microbatches=8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["findings"][0]["kind"] == "bubble"
    assert main(["doctor", "pp=2,schedule=zb-v,microbatches=64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_a_plan_is_shown_with_all_of_its_ranks_and_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "dp=64,pp=8,microbatches=16"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "dp=64,pp=8,microbatches=16: a step of 69 F on 512 ranks\n"
        "F is the time of the forward of a microbatch on an average stage\n"
        "each row is one of 64 ranks that do the same, named by the first\n"
    )
    assert "rank 448 x 64" in told
    assert main(["report", "dp=2,pp=2,microbatches=4,order=dp-pp-cp-tp", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["num_ranks"], answer["unit"], answer["alike"]) == (4, "F", [[0, 2], [1, 3]])


def test_the_layers_of_a_plan_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "pp=2,microbatches=4,layers=1+3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [rank["compute"] for rank in answer["parts"]] == [6, 18]
    assert main(["report", "pp=2,microbatches=4,layers=1+3+2"]) == 1
    assert "layers=1+3+2" in capsys.readouterr().err
