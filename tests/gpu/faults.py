"""Ranks over NCCL that die, stall, raise, or never come: who is named, how soon, and what is left running.

    python -m tests.gpu.faults                      all cases, on ranks that share what GPUs there are
    python -m tests.gpu.faults --only "spawn dp=2 "  those with these words in their names
    python -m tests.gpu.faults --device cpu         the same over gloo, where there is no GPU

A rank is held up for `limit_seconds` before it is named: 20 s unless a case says otherwise, to save time. It ends with
status 1 if the wrong rank was named, or late, or if something still runs.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch

from shardwise import environment
from shardwise.planner.plan import Plan
from shardwise.ranks.faults import LIMIT_SECONDS
from shardwise.ranks.gpus import Gpus
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from tests.gpu.fault_ranks import train_and_fail
from tests.ranks.processes import are_gone

#: What we promise: a rank that dies or stalls is named within so many seconds.
PROMISED_SECONDS = 30.0
_SHORT = 4.0
#: Plan, fault, the rank that it happens to, and how long a rank may stand still.
CASES: list[tuple[str, str, int, float]] = [
    ("dp=2", "kill", 1, LIMIT_SECONDS),
    ("dp=2", "stop", 1, LIMIT_SECONDS),
    ("dp=2", "raise", 1, _SHORT),
    ("dp=2", "absent", 0, _SHORT),
    ("tp=2", "kill", 0, _SHORT),
    ("tp=2", "late", 1, _SHORT),
    ("tp=2", "raise", 0, _SHORT),
    ("pp=2,microbatches=4", "kill", 1, _SHORT),
    ("pp=2,microbatches=4", "stop", 0, _SHORT),
    ("pp=2,microbatches=4", "late", 1, LIMIT_SECONDS),
    ("pp=2,microbatches=4", "raise", 1, _SHORT),
    ("dp=2,zero=3", "kill", 0, _SHORT),
    ("dp=2,zero=3", "absent", 1, _SHORT),
    ("dp=2,pp=2,microbatches=2", "kill", 3, _SHORT),
    ("dp=2,pp=2,microbatches=2", "stop", 1, _SHORT),
    ("dp=2,pp=2,microbatches=2", "raise", 2, _SHORT),
]
UNDER_TORCHRUN = [("dp=2", "kill", 1), ("dp=2", "raise", 1), ("pp=2,microbatches=4", "late", 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of a case. `seconds` until the rank was named to whoever started the ranks; `told` by each survivor."""

    how: str
    plan: str
    fault: str
    rank: int
    seconds: float | None
    told: dict[str, float]
    sentence: str
    problem: str | None

    @property
    def name(self) -> str:
        return f"{self.how} {self.plan} {self.fault}"

    def __str__(self) -> str:
        took = "never" if self.seconds is None else f"{self.seconds:.1f} s"
        told = ", ".join(f"rank {rank} {seconds:.1f} s" for rank, seconds in self.told.items())
        first = self.sentence.partition("\n")[0]
        verdict = "ok" if self.problem is None else f"WRONG: {self.problem}"
        return f"{self.how:8} {self.plan:26} {self.fault:7} rank {self.rank}  {took} ({told}) {verdict}\n    {first}"


def try_spawned(plan: str, fault: str, victim: int, limit_seconds: float, gpus: Gpus) -> Row:
    """The fault on ranks that this process starts."""
    with tempfile.TemporaryDirectory() as name:
        folder, parsed = Path(name), Plan.parse(plan)
        ranks, error = Ranks(parsed.num_ranks, gpus=gpus), None
        try:
            ranks.run(train_and_fail, parsed, fault, victim, limit_seconds, folder, timeout_seconds=100)
        except Exception as caught:
            error = caught
        ended = time.monotonic()
        problem = None
        if not isinstance(error, RankError) or error.rank != victim:
            problem = f"rank {getattr(error, 'rank', None)} was named"
        ranks.close()
        return _row("spawn", plan, fault, victim, folder, ended, str(error), problem)


def _see_end(process: "subprocess.Popen[bytes]", said: IO[str]) -> tuple[int | None, float, str]:
    """The status of a command (None: it had to be killed), when it ended, and what it said."""
    try:
        status: int | None = process.wait(timeout=100)
    except subprocess.TimeoutExpired:
        process.kill()
        status = None
    ended = time.monotonic()
    said.seek(0)
    return status, ended, said.read()


def try_torchrun(plan: str, fault: str, victim: int, device: str) -> Row:
    """The fault on ranks of `torchrun`, which says itself which of them ended first."""
    with tempfile.TemporaryDirectory() as name:
        folder, count = Path(name), Plan.parse(plan).num_ranks
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "tests.gpu.fault_ranks"]
        variables = {**environment.all_variables(), "SHARDWISE_SHARE_GPUS": "1", "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", *words, plan, fault, str(victim), str(_SHORT), str(folder)]
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(command, env=variables, stdout=said, stderr=said)
            status, ended, text = _see_end(process, said)
        named = [line for line in text.splitlines() if f"rank {victim} " in line or f"rank      : {victim} " in line]
        problem = None if named else f"rank {victim} was not named: {text[-600:]}"
        if not status:
            problem = f"torchrun ended with status {status}: {text[-600:]}"
        return _row("torchrun", plan, fault, victim, folder, ended, named[0].strip() if named else "", problem)


def _row(
    how: str, plan: str, fault: str, victim: int, folder: Path, ended: float, sentence: str, problem: str | None
) -> Row:
    happened = folder / "happened"
    if not happened.exists():
        return Row(
            how=how, plan=plan, fault=fault, rank=victim, seconds=None, told={}, sentence=sentence,
            problem="nothing happened",
        )  # fmt: skip
    start, told = float(happened.read_text()), dict[str, float]()
    for path in sorted(folder.glob("told*")):
        when, named, text = path.read_text().split("\n", 2)
        told[path.name.removeprefix("told")] = float(when) - start
        if named != str(victim):
            problem = problem or f"{path.name} says rank {named}: {text.partition(chr(10))[0]}"
    left = [path.name for path in folder.glob("process*") if not are_gone([int(path.read_text())], seconds=5)]
    if left:
        problem = problem or f"{', '.join(left)} still run"
    # Of a rank that raised or died, torchrun has the sentence; of what else ends late it is its own patience.
    late = max([ended - start if how == "spawn" else 0.0, *told.values()])
    if late > PROMISED_SECONDS:
        problem = problem or f"it took {late:.0f} s"
    return Row(
        how=how, plan=plan, fault=fault, rank=victim, seconds=ended - start, told=told, sentence=sentence,
        problem=problem,
    )  # fmt: skip


def try_train(device: str) -> Row:
    """`shardwise train`, of whose ranks one is killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [
            "train",
            "tiny",
            "--devices",
            "2",
            "--plan",
            "dp=2",
            "--set",
            "steps=100000",
            "--folder",
            f"{name}/run",
        ]
        variables = {**environment.all_variables(), "OMP_NUM_THREADS": "1"}
        if device == "cuda":
            words.append("--share-gpus")
        else:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "shardwise", *words]
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(command, env=variables, stdout=said, stderr=said)
            ranks = _wait_for_ranks(process.pid, folder / "run" / "metrics.jsonl")
            for number, each in enumerate(ranks):
                (folder / f"process{number}").write_text(str(each))
            (folder / "happened").write_text(str(time.monotonic()))
            if ranks:
                os.kill(ranks[-1], 9)
            status, ended, text = _see_end(process, said)
        named = [line for line in text.splitlines() if "was killed by SIGKILL" in line]
        problem = None if named and status else f"status {status}, {len(ranks)} ranks found: {text[-600:]}"
        sentence = named[0] if named else ""
        victim = int(sentence.partition("rank ")[2].partition(" ")[0]) if named else -1
        return _row("train", "dp=2", "kill", victim, folder, ended, sentence, problem)


def _wait_for_ranks(parent: int, metrics: Path) -> list[int]:
    """The ranks of a run that has begun to train: those of its processes that were forked by a process of its own."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) > 2:
            return [each for child in _children(parent) for each in _children(child)]
        time.sleep(0.2)
    return []


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[1]) == parent and words[0] != "Z":
            found.append(int(path.parent.name))
    return found


def _all_cases(device: str) -> Iterator[tuple[str, Callable[[], Row]]]:
    """By name: what tries it."""
    gpus: Gpus = "shared" if device == "cuda" else "none"
    for plan, fault, victim, limit in CASES:
        yield f"spawn {plan} {fault}", partial(try_spawned, plan, fault, victim, limit, gpus)
    for plan, fault, victim in UNDER_TORCHRUN:
        yield f"torchrun {plan} {fault}", partial(try_torchrun, plan, fault, victim, device)
    yield "train dp=2 kill", partial(try_train, device)


def names(counts: Collection[int] = (2, 4)) -> list[str]:
    """All cases with so many ranks."""
    return [name for name, _ in _all_cases("cpu") if _num_ranks(name) in counts]


def _num_ranks(name: str) -> int:
    return Plan.parse(name.split()[1]).num_ranks


def cases(
    device: str,
    *,
    known: Collection[str] = (),
    only: str = "",
    deadline: float = math.inf,
    counts: Collection[int] = (2, 4),
) -> Iterator[Row]:
    """Try all with so many ranks that are not known yet, as long as there is time for another."""
    # Two whole steps have loaded every kernel before something happens, and ranks are up sooner so.
    with environment.changed({"CUDA_MODULE_LOADING": "LAZY"}):
        for name, try_it in _all_cases(device):
            if name not in known and only in name and _num_ranks(name) in counts and time.monotonic() < deadline:
                yield try_it()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it: spawn dp=2 kill")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case is begun after so many")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", metavar="FILE", help="where the record goes")
    arguments = parser.parse_args(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU was found: nothing was tried", file=sys.stderr)
        return 1
    rows: list[Row] = []
    start = time.monotonic()
    for row in cases(arguments.device, only=arguments.only, deadline=start + arguments.seconds):
        rows.append(row)
        print(row, flush=True)
        if arguments.json:
            text = json.dumps({"rows": [asdict(each) for each in rows]}, indent=1)
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    wrong = [row for row in rows if row.problem is not None]
    print(f"{len(rows) - len(wrong)} faults named in time, {len(wrong)} not, {time.monotonic() - start:.0f} s")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
