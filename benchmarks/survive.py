"""What a run survives, and how soon it goes on: random kills, restarts from memory beside torchrun's own from disk.

    python benchmarks/survive.py --kills 20 --restarts 5        [--seconds 900: no more kills after that]
    python benchmarks/survive.py --kills 60 --restarts 0 --seed 304 --shared        other work runs here: no times kept

1. Two machines (agents of torchrun with names and memory of their own) train a small model while ranks, agents,
   keepers and whole machines are killed at random. The losses are compared with those of a run that nobody disturbed,
   bit by bit.
2. A rank is killed again and again in two runs, one after the other: with copies in memory, and with torchrun's own
   restart, which imports everything anew and reads a checkpoint. What is measured is the time to the next step.
3. What copies cost: of a larger model's steps, with as many between them as the run chooses.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import kept, record

from shardwise import environment
from shardwise.standby.asker import find_server
from shardwise.trace.journal import read_journal
from tests.training.kills import Kills, forget, stop
from tests.training.nodes import Nodes, kill, train_words
from tests.training.programs import losses_of

PLAN = "dp=2,zero=1"
#: As docs/clusters.md says it: who does not answer for 5 s is gone.
MEETING = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=3"
#: What says more of other work than of ours where a machine is shared.
TIMES = ("seconds to the next step", "median seconds to the next step", "worst")


def calm(folder: Path, steps: int) -> list[float]:
    """The losses of a run that nobody disturbs."""
    nodes = Nodes(folder, train_words(folder, PLAN, copies_every=0, steps=steps), fewest=2, most=2)
    for name in ("a", "b"):
        nodes.start(name)
    try:
        assert nodes.join(900) == [0, 0], nodes.said()
    finally:
        nodes.close()
    return losses_of(folder)


def random_kills(folder: Path, memory: Path, num_kills: int, seconds: float, seed: int) -> dict[str, object]:
    words = train_words(folder / "wild", PLAN, steps=1_000_000, checkpoint__every=50, log=1)
    nodes = Nodes(folder / "wild", words, fewest=2, most=2, meeting=MEETING)
    kills = Kills(nodes=nodes, chance=random.Random(seed), names=("a", "b"))
    deadline = time.monotonic() + seconds
    try:
        for name in kills.names:
            nodes.start(name)
        nodes.wait(lambda: nodes.step() >= 5)
        while len(kills.done) < num_kills and time.monotonic() < deadline:
            kills.one()
            target, moment, took = kills.done[-1]
            print(f"{len(kills.done)}: {target} ({moment}), {took:.1f} s", flush=True)
        stop(nodes)
    finally:
        forget(nodes, memory)
    wild = losses_of(folder / "wild")
    return {**kills.summary(), "steps": len(wild), "same losses to the bit": wild == calm(folder / "calm", len(wild))}


def restarts(folder: Path, memory: Path, count: int) -> dict[str, object]:
    """One run after the other, so that neither takes the other's cores."""
    found = {}
    for name, copies_every, every in (("copies in memory", 2, 0), ("torchrun, from disk", 0, 2)):
        words = train_words(
            folder / name, PLAN, copies_every=copies_every, steps=1_000_000, checkpoint__every=every, log=1
        )
        nodes = Nodes(folder / name, words, fewest=1, most=1, ranks=2)
        try:
            nodes.start("a")
            nodes.wait(lambda nodes=nodes: nodes.step() >= 8)  # type: ignore[misc]
            while copies_every and (server := find_server(folder / name, "a")) is None:
                time.sleep(0.1)
            if copies_every and server is not None:
                server.close()
            seconds = [_killed(nodes) for _ in range(count)]
        finally:
            forget(nodes, memory)
        found[name] = {"seconds from a kill to the next step": seconds, "median": statistics.median(seconds)}
        print(name, found[name], flush=True)
    return found


def _killed(nodes: Nodes) -> float:
    """Kill a rank. Returns how long it is until the next step."""
    begun, num_starts = time.monotonic(), len(nodes.starts())
    kill(nodes.starts()[-1]["places"][1]["process"])
    nodes.wait(lambda: len(nodes.starts()) > num_starts)
    again = nodes.starts()[-1]["step"]
    nodes.wait(lambda: nodes.step() > again)
    took = time.monotonic() - begun
    nodes.wait(lambda: nodes.step() > again + 6)
    return round(took, 2)


def cost(folder: Path) -> dict[str, object]:
    """The part of the time that copies took of a run of 1 M parameters on one rank, by what each of them took."""
    changes = {"model.width": 128, "model.layers": 4, "steps": 400, "evaluation.every": 0, "evaluation.sample": 0,
               "checkpoint.every": 0}  # fmt: skip
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
               "-m", "shardwise", "train", "tiny", "--plan", "dp=1", *sets,
               "--folder", str(folder / "cost")]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    (told,) = [each for each in read_journal(folder / "cost") if each["event"] == "copies" and "num_copies" in each]
    return {"copies": told["num_copies"], "steps between": told["steps_between"], "of the time": told["share"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared", action="store_true", help="other work runs on this machine: keep no times of kills")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(SHARDWISE_COPIES="/dev/shm", OMP_NUM_THREADS="1")
        parts = {
            "restarts": lambda: restarts(folder, folder / "none", asked.restarts) if asked.restarts else None,
            "cost": lambda: cost(folder) if asked.restarts else None,
            # One seed beside the other: what was found before stays.
            f"random kills, seed {asked.seed}": lambda: (
                random_kills(folder, folder / "none", asked.kills, asked.seconds, asked.seed) if asked.kills else None
            ),
        }
        for each, part in parts.items():
            result = part()
            if result is not None:
                print(each, result, flush=True)
                # Whether anything else was going on, part by part.
                load = [round(number, 1) for number in os.getloadavg()]
                told = {**result, "date": datetime.now(UTC).date().isoformat(), "load": load}
                told["processor"] = environment.processor_name()
                if asked.shared:
                    told = {key: value for key, value in told.items() if key not in TIMES}
                    told["times"] = "not kept: the machine was shared with other work"
                record("survive", {**kept("survive"), each: told})


if __name__ == "__main__":
    main()
