"""Two agents of `torchrun`, as on two machines: one is killed with its ranks, and the other goes on alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.training.checkpoint.index import saved_steps
from shardwise.training.job import Job
from shardwise.training.recipe import get_recipe
from tests.ports import free_port
from tests.training import test_restart as restart
from tests.training.programs import losses_of
from tests.training.test_restart import ROOT, undisturbed, workers

STEPS = 30
PLAN = "dp=2,zero=1"
CHANGES = {**restart.CHANGES, "steps": STEPS}
#: Who does not answer for eight seconds is gone, and others are waited for no longer than five.
MEETING = "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=5"


def start_agent(folder: Path, port: int, *, is_host: bool) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
        "--max-restarts", "9",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two",
        "--rdzv-conf", f"{MEETING},is_host={int(is_host)}", "-m", "shardwise", "train", "tiny", "--plan", PLAN,
        *(word for key, value in CHANGES.items() for word in ("--set", f"{key}={value}")), "--folder", str(folder),
    ]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.whole
def test_when_an_agent_dies_with_its_ranks_the_other_plans_again_and_goes_on(two: Ranks, tmp_path: Path) -> None:
    recipe = get_recipe("tiny").changed(CHANGES, source="the test")
    two.run(undisturbed, Job(recipe=recipe, plan=Plan.parse(PLAN), folder=tmp_path / "calm", command=""))
    wild, port = tmp_path / "wild", free_port()
    stays, goes = (start_agent(wild, port, is_host=is_host) for is_host in (True, False))
    try:
        while stays.poll() is None and goes.poll() is None and not saved_steps(wild / "checkpoints"):
            time.sleep(0.01)
        for process in (goes.pid, *workers(goes.pid)):
            os.kill(process, signal.SIGKILL)
        _, errors = stays.communicate(timeout=180)
    finally:
        for agent in (stays, goes):
            agent.kill()
            agent.communicate()
    assert stays.returncode == 0, errors
    assert " from step " in errors
    assert " on 1 x cpu" in errors, "it was planned again, for the one that is left"
    assert len(losses_of(wild)) == STEPS
    assert losses_of(wild) == pytest.approx(losses_of(tmp_path / "calm"), rel=1e-5)
