"""`shardwise profile`: some steps measured, and this machine's prices."""

import json
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cluster.catalogue import get_device
from shardwise.cluster.file import load


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_profile_measures_and_tells_and_calibrates(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "profile",
        "tiny",
        "--plan",
        "pp=2,microbatches=4",
        "--steps",
        "1",
        "--calibrate",
        "cluster.toml",
        "--json",
    ]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    folder = Path(answer["run"])
    assert {path.name for path in folder.iterdir()} >= {"trace.json", "predicted.json", "plan.toml", "report.html"}
    assert not (folder / "checkpoints").exists()
    for rank in answer["parts"]:
        assert sum(rank.values()) == pytest.approx(answer["traced_step_seconds"], rel=0.01)
    assert {(link["from"], link["to"]) for link in answer["links"]} == {(0, 1), (1, 0)}
    assert answer["streams"] == [[], []]
    assert answer["reading_seconds"] == 0
    cluster = load(Path("cluster.toml"))
    assert cluster.num_devices == 2
    device = cluster.pools[0].device
    assert device.peak("fp32") > 1e8
    assert cluster.pools[0].node.link.name == "measured"
    assert (device.architecture, len(device.kernels)) == ("cpu", len(get_device("cpu").kernels))
    assert main(["doctor", answer["run"], "--json"]) == 0


def test_a_training_runs_folder_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run/checkpoints").mkdir(parents=True)
    assert main(["profile", "tiny", "--devices", "1", "--folder", "run"]) == 1
    assert "is the folder of a training run" in capsys.readouterr().err


def test_at_least_one_step_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "tiny", "--steps", "0"]) == 1
    assert "--steps 0: it must be at least 1" in capsys.readouterr().err
