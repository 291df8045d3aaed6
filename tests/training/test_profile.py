"""`shardwise profile`: some steps measured, and this machine's prices."""

import json
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cluster.file import load
from shardwise.training.profile import kind_of, seconds_by_kind


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
    assert answer["device_seconds"] == {}
    cluster = load(Path("cluster.toml"))
    assert cluster.num_devices == 2
    device = cluster.pools[0].device
    assert device.peak("fp32") > 1e8
    assert cluster.pools[0].node.link.name == "measured"
    assert main(["doctor", answer["run"], "--json"]) == 0


def test_a_training_runs_folder_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run/checkpoints").mkdir(parents=True)
    assert main(["profile", "tiny", "--devices", "1", "--folder", "run"]) == 1
    assert "is the folder of a training run" in capsys.readouterr().err


def test_at_least_one_step_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "tiny", "--steps", "0"]) == 1
    assert "--steps 0: there is at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "host to device"),
        ("Memcpy DtoH (Device -> Pageable)", "device to host"),
        ("Memcpy DtoD (Device -> Device)", "device to device"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "NCCL"),
        ("Memset (Device)", "memory set"),
        ("void gemm<float>", "kernels"),
    ],
)
def test_what_a_gpu_does_is_told_apart_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_seconds_of_a_kind_are_summed() -> None:
    found = seconds_by_kind([("Memcpy HtoD", 1.0), ("a kernel", 2.0), ("Memcpy HtoD", 0.5)])
    assert found == {"host to device": 1.5, "kernels": 2.0}
