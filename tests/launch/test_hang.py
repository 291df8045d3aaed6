"""A hang under `shardwise launch`: named with where the rank stood, ended everywhere, and the run goes on."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.trace.journal import read_journal
from shardwise.trace.metrics import read_metrics
from tests.ranks.processes import are_gone

ROOT = Path(__file__).parents[2]
#: A rank that is stopped is named within 30 s. One that does not end by itself is killed by torchrun after 30 s more.
_PATIENCE = 400

_STUCK = '''
import os, time
from pathlib import Path
from tests.training.own_models import Reader

class Stuck(Reader):
    """After some forwards the first rank goes round and round, the first time that there is such a run."""
    num_calls = 0

    def forward(self, input_ids):
        self.num_calls += self.training and input_ids.device.type != "meta"
        if self.num_calls > 60 and os.environ["RANK"] == "0" and not Path("stuck").exists():
            Path("stuck").write_text(str(os.getpid()))
            while True:
                time.sleep(0.01)
        return super().forward(input_ids)

make = Stuck
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}:{tmp_path}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def events(folder: Path, kind: str) -> list[Any]:
    return [each for each in read_journal(folder) if each["event"] == kind]


def launch(folder: Path, *more: str) -> None:
    words = ["launch", "--on", "local", "--device", "cpu", "--restarts", "1", "--", "train", "tiny", "--plan", "dp=2"]
    words += ["--set", "steps=150", "--set", "checkpoint.every=5", "--set", "evaluation.every=0", "--folder", "run"]
    assert main([*words, *more]) == 0
    assert folder.is_dir()


def wait_until(is_so: Any, what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: {read_journal(Path('run'))}"
        time.sleep(0.1)


def see_it_go_on(folder: Path, process: int, rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with who held up the others, starts once more, and does all steps."""
    wait_until(lambda: len(events(folder, "end")) == 2, "the second end")
    first, second = events(folder, "end")
    assert f"rank {rank} has" in first["why"], first
    assert second["why"] == "finished"
    starts = events(folder, "start")
    assert starts[1]["step"] > 0, "it went on from a checkpoint"
    assert are_gone([process]), "what was stopped is no more"
    steps = [row["step"] for row in read_metrics(folder) if "loss" in row]
    assert steps == list(range(1, 151))
    capsys.readouterr()
    assert main(["status", "run", "--json"]) == 0
    assert f"rank {rank} has" in json.loads(capsys.readouterr().out)["starts"][0]["why"]


@pytest.mark.whole
def test_a_rank_that_is_stopped_is_named_and_ended_and_the_run_goes_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(here)
    run = here / "run"
    wait_until(lambda: any(row["step"] >= 10 for row in read_metrics(run)), "ten steps")
    process = events(run, "start")[0]["places"][1]["process"]
    os.kill(process, signal.SIGSTOP)
    see_it_go_on(run, process, 1, capsys)


@pytest.mark.whole
def test_a_rank_that_is_stuck_in_python_is_named_though_it_is_the_first(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "stuck_model.py").write_text(_STUCK)
    launch(here, "--set", "model.source=stuck_model:make")
    wait_until(lambda: (here / "stuck").is_file(), "a rank that is stuck")
    see_it_go_on(here / "run", int((here / "stuck").read_text()), 0, capsys)
    places = events(here / "run", "end")[0]["places"]
    assert any(each.startswith("rank 1 waits for rank 0 at ") for each in places), places
