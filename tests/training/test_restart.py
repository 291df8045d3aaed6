"""kill -9 of a rank under `torchrun`: the run comes back by itself, to the very same losses."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.training.checkpoint.index import saved_steps
from shardwise.training.job import Job
from shardwise.training.recipe import get_recipe
from shardwise.training.run import train_rank
from tests.training.programs import losses_of, saved_state

ROOT = Path(__file__).parents[2]
STEPS = 16
PLAN = "dp=2,zero=1"
CHANGES = {
    "steps": STEPS,
    "checkpoint.every": 4,
    "evaluation.sample": 0,
    "evaluation.every": 0,
    "data.limit_bytes": 40_000,
}
WORDS = ["tiny", "--plan", PLAN, *(word for key in CHANGES for word in ("--set", f"{key}={CHANGES[key]}"))]


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options,
               "-m", "shardwise", "train", *WORDS, "--folder", str(folder)]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers(launcher: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def undisturbed(job: Job) -> None:
    torch.set_num_threads(1)  # As `torchrun` does.
    train_rank(job)


@pytest.mark.whole
def test_a_killed_rank_brings_the_run_back_from_its_last_checkpoint(two: Ranks, tmp_path: Path) -> None:
    recipe = get_recipe("tiny").changed(CHANGES, source="the test")
    two.run(undisturbed, Job(recipe=recipe, plan=Plan.parse(PLAN), folder=tmp_path / "calm", command=""))
    wild = start(tmp_path / "wild", "--max-restarts", "1")
    while wild.poll() is None and not saved_steps(tmp_path / "wild" / "checkpoints"):
        time.sleep(0.01)
    os.kill(workers(wild.pid)[1], signal.SIGKILL)
    _, errors = wild.communicate(timeout=120)
    assert wild.returncode == 0, errors
    assert errors.count(" from step ") == 1, "it went on, and did not begin anew"
    assert losses_of(tmp_path / "wild") == losses_of(tmp_path / "calm")
    assert len(losses_of(tmp_path / "wild")) == STEPS
    before, after = saved_state(tmp_path / "calm"), saved_state(tmp_path / "wild")
    assert all(before[name].equal(after[name]) for name in before)
