"""The examples run as they stand, are short, and learn something."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apart import RANKS, run_script

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
MOST_LINES = 40

pytestmark = pytest.mark.xdist_group(RANKS)


def test_there_are_hugging_face_models_a_resnet_and_a_u_net() -> None:
    names = ["hf_llama", "larger_than_gpu", "mesh_llama", "own_loader", "placed_hf", "resnet", "triton_flow", "unet"]
    assert [path.stem for path in EXAMPLES] == names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_runs_and_its_loss_falls(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MOST_LINES
    if path.name.startswith("triton"):
        pytest.importorskip("triton", reason="no Triton for this machine")
    check(run_script(path, folder=tmp_path))


# Scripts that python is started with are in `ranks/test_spawn.py` and `ranks/test_torchrun.py`: 9 s of a core each.
@pytest.mark.whole
def test_an_example_runs_when_python_is_started_with_it() -> None:
    command = [sys.executable, str(EXAMPLES[-1])]  # One that does without transformers: 5 s of a core to import.
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    check(subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=variables))


def check(finished: "subprocess.CompletedProcess[str]") -> None:
    assert finished.returncode == 0, finished.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", finished.stdout, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
