"""Runs that lose a rank, on the GPU of this machine: they go on from copies in memory, with the losses of a calm run.

    python -m tests.gpu.survive                about a minute; without a GPU the same on processors

They are started by torchrun, and share the GPU over NCCL. The answer is JSON: for each plan what went on from where,
and how long it was from the kill to the next step.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.planner.plan import Plan
from tests.training.nodes import Nodes, kill, train_words
from tests.training.programs import losses_of

PLANS = ("dp=1", "dp=2,zero=1")
STEPS = 40


def run(folder: Path, plan: str, *, kill_at: int | None) -> dict[str, Any]:
    """Train; where `kill_at` is given, the last rank is killed after that step."""
    start = time.monotonic()
    words = train_words(folder, plan, steps=STEPS, log=1)
    words += ["--share-gpus"] if torch.cuda.is_available() else []
    nodes = Nodes(folder, words, fewest=1, most=1, ranks=Plan.parse(plan).num_ranks)
    found: dict[str, Any] = {}
    try:
        nodes.start("a")
        if kill_at is not None:
            nodes.wait(lambda: nodes.step() >= kill_at)
            begun, num_starts = time.monotonic(), len(nodes.starts())
            kill(nodes.starts()[-1]["places"][-1]["process"])
            nodes.wait(lambda: len(nodes.starts()) > num_starts)
            again = nodes.starts()[-1]
            nodes.wait(lambda: nodes.step() > again["step"])
            found = {"from step": again["step"], "source": again.get("source"), "seconds": time.monotonic() - begun}
        assert nodes.join() == [0], nodes.said()
    finally:
        nodes.close()
        print(f"{folder.name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return found | {"losses": losses_of(folder)}


def main() -> int:
    answer, is_right = {}, True
    with tempfile.TemporaryDirectory() as name:
        for number, plan in enumerate(PLANS):
            calm = run(Path(name) / f"calm{number}", plan, kill_at=None)["losses"]
            killed = run(Path(name) / f"killed{number}", plan, kill_at=12)
            losses = killed.pop("losses")
            worst = max(abs(a - b) / abs(a) for a, b in zip(calm, losses, strict=True))
            is_right &= worst < 1e-4 and killed["from step"] > 0
            answer[plan] = {**killed, "worst loss": worst, "steps": len(losses)}
    print(json.dumps({"survived": is_right, "plans": answer}, indent=1))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
