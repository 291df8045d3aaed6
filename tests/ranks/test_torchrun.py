"""One script, three ways to run it, the same losses; and one that ends without closing its engine."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.apart import RANKS, run_ranks, run_script, run_script_on_ranks, run_torchrun

pytestmark = pytest.mark.xdist_group(RANKS)
ROOT = Path(__file__).parents[2]
SCRIPT, UNCLOSED, FAILING = (Path(__file__).with_name(f"{name}_script.py") for name in ("train", "unclosed", "failing"))
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def launched(folder: Path, script: Path | str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    words = ("--standalone", "--nproc-per-node", "2", str(script), *arguments)
    return run_torchrun(*words, folder=folder, variables=VARIABLES)


COMMAND = ("train", "tiny", "--plan", "dp=3", "--folder")


def test_what_all_ranks_refuse_is_said_once(tmp_path: Path) -> None:
    """On ranks that are started as torchrun starts them, without the 10 s of a core that it takes."""
    done = run_ranks(*COMMAND, str(tmp_path / "run"), num_ranks=2, folder=tmp_path)
    assert all(each.returncode != 0 for each in done)
    told = "".join(each.stderr for each in done)
    assert told.count("error: plan dp=3 needs 3 ranks but there are 2") == 1
    assert "[rank" not in told


@pytest.mark.whole
def test_under_torchrun_what_all_ranks_refuse_is_said_once(tmp_path: Path) -> None:
    done = launched(tmp_path, "-m", "shardwise", *COMMAND, str(tmp_path / "run"))
    assert done.returncode != 0
    assert done.stderr.count("error: plan dp=3 needs 3 ranks but there are 2") == 1
    assert "[rank" not in done.stderr


REFUSED = """
import torch, shardwise as sw
sw.parallelize(
    torch.nn.Linear(4, 4), "dp=2", loss=lambda output, _: (output @ output.T).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1), example={"input": torch.eye(4) + 1},
)
"""


@pytest.mark.whole
def test_a_script_that_all_ranks_refuse_has_one_traceback(tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    done = launched(tmp_path, script)
    assert done.returncode != 0
    assert done.stderr.count("]: Traceback (most recent call last)") == 1
    assert "ShardwiseError: the loss of 3 rows is" in done.stderr


def losses_of(done: "subprocess.CompletedProcess[str]") -> list[list[float]]:
    """The losses that each rank printed."""
    assert done.returncode == 0, done.stderr
    return [[float.fromhex(word) for word in line.split()] for line in done.stdout.splitlines()]


def test_a_script_gives_the_same_losses_alone_under_torchrun_and_through_spawn(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """On ranks that are told what torchrun tells its own: torchrun itself, a new Python for each rank, takes 9 s of a
    core more. `tests/launch/test_slurm.py` starts a real one in every run."""
    (alone,) = losses_of(run_script(SCRIPT, folder=tmp_path))
    told = [losses_of(each) for each in run_script_on_ranks(SCRIPT, num_ranks=2, folder=tmp_path)]
    assert len(alone) == 3
    assert alone[2] < alone[0]
    assert told == [told[0]] * 2
    assert told[0] == [pytest.approx(alone, rel=1e-6)]
    if pytestconfig.getoption("--whole"):  # `test_spawn.py` has scripts that start ranks; this one takes 4 s of a core.
        under_torchrun = losses_of(launched(tmp_path, SCRIPT))
        assert under_torchrun == told[0] * 2
        assert losses_of(run_script(SCRIPT, "--spawn", folder=tmp_path)) == under_torchrun


@pytest.mark.whole  # The script of the test above does not close its engine either, and must end well too.
@pytest.mark.parametrize("ending", ["both end", "one is gone"])
def test_a_script_that_does_not_close_its_engine_ends_well(ending: str, tmp_path: Path) -> None:
    """It aborted (-6) if Python ended while the watch was in a call of the store. The script looks there all the time.

    A rank that is gone without a word must hold up nobody's end.
    """
    done = launched(tmp_path, UNCLOSED, ending)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    assert done.stdout.split() == ["trained", "trained"]


@pytest.mark.whole  # Of ranks that are spawned it is in `test_spawn.py`; torchrun takes 14 s of a core to say the same.
def test_a_rank_that_fails_has_the_one_traceback_and_is_called_the_cause(tmp_path: Path) -> None:
    done = launched(tmp_path, FAILING)
    assert done.returncode != 0
    of_ranks = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    assert [line for line in of_ranks if "Traceback" in line] == ["[rank1]: Traceback (most recent call last):"]
    # A line of the other, if torchrun lets it live so long.
    lines = [line for line in of_ranks if line.startswith("[rank0]")]
    assert len(lines) <= 1
    assert all(line.startswith("[rank0]: rank 0 stops: rank 1 failed at 0F0") for line in lines)
    assert all(line.endswith("ValueError: the second rank has enough") for line in lines)
    _, _, cause = done.stderr.partition("Root Cause")
    assert "rank      : 1 (local_rank: 1)" in cause
