"""Mistakes with GPUs that can be made for real on a machine with one: each is a sentence, before anything starts.

    python -m tests.gpu.bad_input

What needs another machine (a GPU too old for bf16, no driver, ranks with different GPUs) is tried in
`tests/ranks/test_gpus.py`, with GPUs that are only described.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from shardwise import environment
from shardwise.engine.parallelize import parallelize
from shardwise.parity.problem import make_optimizer
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from tests.parity.models import make_problem


def command(*words: str, **variables: str) -> str:
    """What a command says when it refuses; empty if it does not, or not with a sentence."""
    with tempfile.TemporaryDirectory() as folder:
        where = ["--folder", f"{folder}/run"] if words[0] == "train" else []
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *words, *where],
            env={**environment.all_variables(), **variables},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    return done.stderr if done.returncode and "Traceback" not in done.stderr else f"NOT REFUSED: {done.stderr[-500:]}"


def torchrun(count: int) -> str:
    """What ranks of torchrun say that are more than GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "shardwise", "train"]
        done = subprocess.run(
            [sys.executable, "-m", *words, "tiny", "--plan", f"dp={count}", "--folder", f"{folder}/run"],
            env=environment.all_variables(), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    return done.stderr


class Huge(nn.Module):
    """More weights than the GPU has memory, none of which anybody has written to: the host gives no memory for them."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_bytes // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight[:1]


def too_large() -> str:
    memory = torch.cuda.get_device_properties(0).total_memory
    batch = {"x": torch.ones(2, device="cuda")}
    return _refused(
        lambda: parallelize(
            Huge(memory + 2**30), "dp=1", loss=lambda output, _: output.mean(), optimizer=make_optimizer, example=batch
        )
    )


def _no_interface(plan: Plan) -> str:
    os.environ["NCCL_SOCKET_IFNAME"] = "nosuch0"
    problem = make_problem("tied", plan)()
    return _refused(
        lambda: parallelize(
            problem.module, plan, loss=problem.loss, optimizer=make_optimizer, example=problem.batches[0]
        )
    )


def no_interface() -> str:
    """Two ranks that are told to talk over an interface that is not there."""
    with Ranks(2, gpus="shared") as ranks:
        told: list[str] = ranks.run(_no_interface, Plan.parse("dp=2"), timeout_seconds=100)
    return told[0]


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "NOT REFUSED"


def cases() -> dict[str, tuple[Callable[[], str], str]]:
    """By name: what is done, and what must be said."""
    count = torch.cuda.device_count() + 1
    many, plan = str(count), f"dp={count}"
    all_hidden = {"CUDA_VISIBLE_DEVICES": ""}
    return {
        "more ranks than GPUs": (
            lambda: command("train", "tiny", "--devices", many, "--plan", plan),
            f"{count} ranks and {count - 1} GPU",
        ),
        "more ranks than GPUs under torchrun": (lambda: torchrun(count), "SHARDWISE_SHARE_GPUS=1"),
        "all GPUs hidden, to be shared": (
            lambda: command("train", "tiny", "--devices", "2", "--plan", "dp=2", "--share-gpus", **all_hidden),
            "CUDA_VISIBLE_DEVICES= hides",
        ),
        "all GPUs hidden, to check": (
            lambda: command("check", "--plan", "dp=2", "--device", "cuda", **all_hidden),
            "CUDA_VISIBLE_DEVICES= hides",
        ),
        "a model that is trained and does not fit": (
            lambda: command(
                "train", "tiny", "--devices", "1", "--set", "model.width=32768", "--set", "model.layers=16"
            ),
            "the leanest plan needs",
        ),
        "a module that does not fit": (too_large, "short)"),
        "an interface that is not there": (no_interface, "NCCL_SOCKET_IFNAME is nosuch0"),
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--json", metavar="FILE", help="where the record goes")
    arguments = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("no GPU was found: nothing was tried", file=sys.stderr)
        return 1
    rows = []
    for name, (try_it, wanted) in cases().items():
        if arguments.only not in name:
            continue
        start = time.monotonic()
        said = try_it()
        is_right, seconds = wanted in said, time.monotonic() - start
        rows.append({"case": name, "ok": is_right, "said": said[:2000], "seconds": seconds})
        print(f"{'ok' if is_right else 'WRONG'}  {name} ({seconds:.1f} s)\n    {said.strip()[:700]}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if rows and all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
