"""One script, three ways to run it, the same losses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train_script.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def losses_of(*command: str) -> list[list[float]]:
    """The losses that each rank printed."""
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return [[float.fromhex(word) for word in line.split()] for line in done.stdout.splitlines()]


def test_a_script_gives_the_same_losses_alone_under_torchrun_and_through_spawn() -> None:
    (alone,) = losses_of(str(SCRIPT))
    launched = losses_of(*TORCHRUN, str(SCRIPT))
    spawned = losses_of(str(SCRIPT), "--spawn")
    assert len(alone) == 3
    assert alone[2] < alone[0]
    assert launched == spawned == [spawned[0], spawned[0]]
    assert launched[0] == pytest.approx(alone, rel=1e-6)
