"""Runs with state on the host: the same losses, checkpoints that go from plan to plan, a refusal before the start."""

from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from shardwise.training import choose
from shardwise.training.choose import check_host
from shardwise.training.data.source import check_data
from shardwise.training.model import make_module, num_parameters, settings_of
from shardwise.training.run import train_rank
from shardwise.units import format_bytes
from tests.training.programs import losses_of, make_job

HOST = "offload.optimizer=1,offload.activations=1"


def test_a_run_goes_on_from_a_checkpoint_with_state_on_the_host_and_back(two: Ranks, tmp_path: Path) -> None:
    plan = "dp=2,zero=1,microbatches=2"
    two.run(train_rank, make_job(tmp_path / "plain", plan, steps=6))
    moved = tmp_path / "moved"
    hosts = [f",{HOST}", "", ",offload.optimizer=0.5", ",offload.parameters=1", ",offload.parameters=0.5"]
    for steps, host in zip((2, 3, 4, 5, 6), hosts, strict=True):
        two.run(train_rank, make_job(moved, f"{plan}{host}", steps=steps))
    assert losses_of(moved) == losses_of(tmp_path / "plain")


def test_the_command_trains_with_a_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    words = ["train", "tiny", "--devices", "1", "--plan", f"microbatches=2,{HOST}", "--folder", str(folder)]
    assert main([*words, "--set", "steps=2", "--json"]) == 0
    assert f"microbatches=2,{HOST}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "optimizer", "bytes_of_a_number"),
    [("offload.optimizer=1", "adamw", 8), ("offload.optimizer=1", "sgd", 4), ("offload.parameters=1", "adamw", 16)],
)
def test_a_host_without_room_is_refused_before_a_rank_is_started(
    host: str, optimizer: str, bytes_of_a_number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, f"dp=2,{host}", optimizer__name=optimizer)
    module = make_module(settings_of(job.recipe, check_data(job.recipe.data)))
    needed = 2 * bytes_of_a_number * num_parameters(module)
    for available in (needed, needed - 10):
        monkeypatch.setattr(choose, "available_bytes", lambda available=available: available)
        if available == needed:
            check_host(job)
    said = f"{host} of 2 ranks of this machine needs {format_bytes(needed)} of pinned memory on its host"
    with pytest.raises(ShardwiseError, match=f"^{said}"):
        check_host(job)
