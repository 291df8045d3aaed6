"""kill -9 of a random rank at random moments: does every run come back, to the very same losses?

The first run has two processes under `torchrun`, is killed 20 times, and is brought back by `torchrun` each time; every
other kill waits until a checkpoint is being written. Its losses are compared with those of a run that nobody disturbed,
bit by bit. The second is killed 6 times and each time started again by hand under another plan: its losses may differ
by 1e-5. Every checkpoint that is there after a kill is read whole and compared with its checksums.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from record import record

from shardwise.errors import ShardwiseError
from shardwise.trace.metrics import read_metrics
from shardwise.training.checkpoint.index import SAVING, find_last
from shardwise.training.checkpoint.read import Reader
from shardwise.training.folder import CHECKPOINTS

NUM_KILLS, STEPS = 20, 400
PLANS = ("dp=2,zero=1", "pp=2,microbatches=2", "tp=2", "dp=2,zero=3", "pp=2,schedule=zb-h1,microbatches=4", "dp=2")
FEW_STEPS = 60
NEAR = 1e-5
EVERY = 3


@dataclass(kw_only=True)
class Disturbance:
    """What was done to a run, and what was found after it."""

    chance: random.Random
    kills: int = 0
    while_saving: int = 0
    checkpoints_read: int = 0
    unreadable: list[str] = field(default_factory=list)

    def kill_one(self, processes: list[int], root: Path) -> None:
        """Kill one of the processes, and read the checkpoint that is left."""
        is_saving = any(root.glob(f"step-*{SAVING}"))
        try:
            os.kill(self.chance.choice(processes), signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills += 1
        self.while_saving += is_saving
        last = find_last(root)
        if last is None:
            return
        try:
            with Reader(last) as reader:
                reader.verify()
            self.checkpoints_read += 1
        except ShardwiseError as error:
            if last.exists():  # Else the ranks that are left have pruned it while it was read.
                self.unreadable.append(error.problem)


def start(words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", *words, "--folder", str(folder)]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def training(plan: str, steps: int) -> list[str]:
    changes = (f"steps={steps}", f"checkpoint.every={EVERY}", "evaluation.every=0", "evaluation.sample=0")
    return ["shardwise", "train", "tiny", "--plan", plan, *(word for each in changes for word in ("--set", each))]


def under_torchrun(plan: str, steps: int) -> list[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(2 * NUM_KILLS)]
    return [*launcher, "-m", *training(plan, steps)]


def children(process: int) -> list[int]:
    try:
        words = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(word) for word in words]


def ranks_of(process: int) -> list[int]:
    """The ranks that `shardwise train` has started: children of the server that forks them."""
    return [rank for child in children(process) for rank in children(child)]


def last_step(folder: Path) -> int:
    return max((row["step"] for row in read_metrics(folder)), default=0)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def wait_for(run: subprocess.Popen[bytes], folder: Path, disturbance: Disturbance) -> None:
    """Until a run has come further than it was, and then for a random moment; every other time, for a save."""
    before, root = last_step(folder), folder / CHECKPOINTS
    while run.poll() is None and last_step(folder) <= before:
        time.sleep(0.01)
    time.sleep(disturbance.chance.uniform(0.0, 0.25))
    if disturbance.kills % 2:
        while run.poll() is None and not any(root.glob(f"step-*{SAVING}")):
            time.sleep(0.0005)


def under_one_plan(folder: Path, chance: random.Random) -> dict[str, object]:
    """Twenty kills, and `torchrun` to bring the run back."""
    calm, wild, plan = folder / "calm", folder / "wild", PLANS[0]
    assert start(under_torchrun(plan, STEPS), calm).wait() == 0, "the undisturbed run failed"
    found, begun = Disturbance(chance=chance), time.monotonic()
    run = start(under_torchrun(plan, STEPS), wild)
    while found.kills < NUM_KILLS and run.poll() is None:
        wait_for(run, wild, found)
        alive = children(run.pid)
        if alive and run.poll() is None:
            found.kill_one(alive, wild / CHECKPOINTS)
            time.sleep(0.3)
    status, expected, told = run.wait(), losses(calm), losses(wild)
    differing = sum(left != right for left, right in zip(expected, told, strict=False))
    return {
        **told_of(found),
        "seconds": time.monotonic() - begun,
        "status": status,
        "losses": len(told),
        "losses_expected": len(expected),
        "differing_losses": differing + abs(len(expected) - len(told)),
    }


def under_other_plans(folder: Path, chance: random.Random) -> dict[str, object]:
    """A kill, and the run goes on under the next plan."""
    calm, wild = folder / "calm", folder / "wild"
    assert start(training(PLANS[0], FEW_STEPS), calm).wait() == 0, "the undisturbed run failed"
    found, begun = Disturbance(chance=chance), time.monotonic()
    for plan in PLANS:
        run = start(training(plan, FEW_STEPS), wild)
        wait_for(run, wild, found)
        alive = ranks_of(run.pid)
        if alive and run.poll() is None:
            found.kill_one(alive, wild / CHECKPOINTS)
        run.wait()
    status, expected, told = start(training(PLANS[0], FEW_STEPS), wild).wait(), losses(calm), losses(wild)
    furthest = max(abs(left - right) / abs(left) for left, right in zip(expected, told, strict=True))
    return {
        **told_of(found),
        "seconds": time.monotonic() - begun,
        "plans": list(PLANS),
        "status": status,
        "losses": len(told),
        "furthest_relative_difference": furthest,
    }


def told_of(found: Disturbance) -> dict[str, object]:
    return {
        "kills": found.kills,
        "kills_while_a_checkpoint_was_written": found.while_saving,
        "checkpoints_read_after_kills": found.checkpoints_read,
        "unreadable_checkpoints": found.unreadable,
    }


def main() -> int:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        same = under_one_plan(Path(name) / "same", chance)
        print(f"one plan: {same}")
        other = under_other_plans(Path(name) / "other", chance)
        print(f"other plans: {other}")
    record("kills", {"one_plan": same, "other_plans": other})
    is_well = (
        same["kills"] == NUM_KILLS
        and same["status"] == other["status"] == 0
        and not same["differing_losses"]
        and not same["unreadable_checkpoints"]
        and not other["unreadable_checkpoints"]
        and float(str(other["furthest_relative_difference"])) <= NEAR
    )
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
