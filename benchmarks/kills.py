"""kill -9 of a random rank at random moments, under `torchrun`: does every run come back, to the very same losses?

A run of two processes is killed at 20 moments, most of them while it saves often, and is started again by `torchrun`
each time. Its losses are compared with those of a run that nobody disturbed, bit by bit; every checkpoint that is there
after a kill is read whole and compared with its checksums.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import record

from shardwise.training.checkpoint.index import find_last
from shardwise.training.checkpoint.read import Reader
from shardwise.training.folder import CHECKPOINTS, read_metrics

NUM_KILLS = 20
STEPS, EVERY = 400, 3
WORDS = ("tiny", "--plan", "dp=2,zero=1", "--set", f"steps={STEPS}", "--set", f"checkpoint.every={EVERY}",
         "--set", "evaluation.every=0", "--set", "evaluation.sample=0")  # fmt: skip


def start(folder: Path) -> subprocess.Popen[bytes]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    restarts = ["--max-restarts", str(2 * NUM_KILLS)]
    command = [sys.executable, *launcher, *restarts, "-m", "shardwise", "train", *WORDS, "--folder", str(folder)]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def workers(launcher: int) -> list[int]:
    try:
        words = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(word) for word in words]


def steps_of(folder: Path) -> list[int]:
    try:
        return [row["step"] for row in read_metrics(folder) if "loss" in row]
    except (FileNotFoundError, ValueError):
        return []


def disturb(run: subprocess.Popen[bytes], folder: Path, chance: random.Random) -> int:
    """Kill a worker, again and again, each time when the run has come further. Returns how often."""
    kills = 0
    while kills < NUM_KILLS and run.poll() is None:
        before = max(steps_of(folder), default=0)
        while run.poll() is None and max(steps_of(folder), default=0) <= before:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.25))
        alive = workers(run.pid)
        if not alive or run.poll() is not None:
            continue
        os.kill(chance.choice(alive), signal.SIGKILL)
        kills += 1
        last = find_last(folder / CHECKPOINTS)
        if last is not None:
            try:
                with Reader(last) as reader:
                    reader.verify()
            except FileNotFoundError:
                pass  # It was pruned between the two looks.
        time.sleep(0.3)
    return kills


def main() -> int:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        calm, wild = Path(name) / "calm", Path(name) / "wild"
        assert start(calm).wait() == 0, "the undisturbed run failed"
        begun = time.monotonic()
        run = start(wild)
        kills = disturb(run, wild, chance)
        status = run.wait()
        seconds = time.monotonic() - begun
        expected = {row["step"]: row["loss"] for row in read_metrics(calm) if "loss" in row}
        found = {row["step"]: row["loss"] for row in read_metrics(wild) if "loss" in row}
    differing = [step for step in expected if found.get(step) != expected[step]]
    print(f"{kills} kills in {seconds:.0f} s, exit status {status}, {len(differing)} of {len(expected)} losses differ")
    record("kills", {"kills": kills, "seconds": seconds, "status": status, "differing_losses": len(differing)})
    return 0 if kills == NUM_KILLS and status == 0 and not differing else 1


if __name__ == "__main__":
    sys.exit(main())
