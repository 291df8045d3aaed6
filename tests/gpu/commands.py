"""Each command typed as a user types it, on the GPU of this machine: whether it works, and what it says if not.

    python -m tests.gpu.commands                     about 2 minutes on an H200 with 16 cores
    python -m tests.gpu.commands --only train --jobs 1
    python -m tests.gpu.commands --device cpu        the same words without a GPU: that this script is right

Every command is a process of its own, several at a time; one that goes on from another's folder waits for it. It ends
with status 1 if one of them fails. Nothing is installed; what is left out is said.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.gpu.record import Record
from tests.gpu.seen import (
    Seen,
    calibrated,
    converted,
    finished_before,
    has_page,
    has_steps,
    has_trained,
    is_same,
    learns,
    said,
    same_losses,
    stopped_at,
)

ROOT = Path(__file__).parents[2]
#: A command that takes longer stands still.
LIMIT_SECONDS = 240.0
#: On a GPU at a time, beside other tests. What has more than two processes is a piece of its own there.
PROCESSES, NARROW = 5, 2
_LAST_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is typed after `shardwise`, or (`script`) after `python`; what has to be true of it, and after which other
    cases. `needs` are packages beside ours; `processes` are on the GPU at a time."""

    name: str
    words: str
    holds: Callable[[Seen], str | None]
    after: tuple[str, ...] = ()
    script: bool = False
    needs: tuple[str, ...] = ()
    status: int = 0
    gpu_only: bool = False
    processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one went; `problem` is None if all of it holds."""

    name: str
    command: str
    seconds: float = 0.0
    problem: str | None = None
    told: dict[str, Any] = field(default_factory=dict)


def cases(device: str) -> list[Case]:
    """All of them. `DEVICE` in words is the device."""
    steady = "--set log=1000 --set evaluation.sample=0 --set optimizer.schedule=constant"
    short = "--set steps=6 --set evaluation.sample=0"
    found = [
        Case(
            name="train",
            words="train --set steps=20 --set evaluation.every=10 --set checkpoint.every=10 --devices 1 --folder first",
            holds=has_trained(20, sample=True),
        ),
        Case(name="resume", words="train --folder first --set steps=30 --devices 1", holds=has_trained(30, sample=True),
             after=("train",)),
        Case(name="nothing left", words="train --folder first --devices 1", holds=finished_before(30),
             after=("resume",)),
        Case(name="report", words="report first --save page.html", holds=has_page("page.html"),
             after=("nothing left",), processes=0),
        Case(name="doctor", words="doctor first", holds=said("findings"), after=("nothing left",)),
        Case(name="convert", words="convert first first-hf", holds=converted("first-hf"), after=("nothing left",)),
        Case(name="bf16", words=f"train tiny {short} --set precision=bf16 --devices 1 --folder bf16",
             holds=has_trained(6, precision="bf16")),
        Case(name="fp16", words=f"train tiny {short} --set precision=fp16 --devices 1 --folder fp16",
             holds=has_trained(6, precision="fp16")),
        Case(name="compiled", words=f"train tiny {short} --set precision=bf16 --set compile=on --devices 1 --folder c",
             holds=has_trained(6, precision="bf16", compiled=True), gpu_only=True),
        Case(name="experts", words=f"train tiny {short} --set model.experts=4 --devices 1 --folder experts",
             holds=has_trained(6)),
        Case(name="dropout", words=f"train tiny {short} --set model.dropout=0.1 --devices 1 --folder dropout",
             holds=has_trained(6)),
        Case(name="sgd", words=f"train tiny {short} --set optimizer.name=sgd --devices 1 --folder sgd",
             holds=has_trained(6)),
        Case(name="read late", words=f"train tiny {steady} --set steps=12 --devices 1 --folder late",
             holds=has_trained(12)),
        Case(name="read at once", words=f"train tiny {steady} --set log=1 --set steps=12 --devices 1 --folder once",
             holds=same_losses("late", "once"), after=("read late",)),
        Case(name="not finite", words=f"train tiny {steady} --set optimizer.rate=1e30 --set steps=12 --devices 1 "
             "--folder nan", holds=stopped_at("the first layer whose"), status=1),
        Case(name="offload", words=f"train tiny {short} --plan dp=1,offload.optimizer=1 --folder offload",
             holds=has_trained(6)),
        Case(name="profile", words="profile tiny --steps 2 --devices 1 --folder prof --calibrate cluster.toml",
             holds=calibrated("cluster.toml")),
        Case(name="plan", words="plan gpt2 --cluster cluster.toml --batch 2 --sequence 128", holds=said("plan"),
             after=("profile",), processes=0),
        Case(name="share", words=f"train tiny {short} --plan dp=2 --devices 2 --share-gpus --folder share",
             holds=has_trained(6), processes=2),
        Case(name="share a pipeline", words=f"train tiny {short} --plan pp=2,microbatches=2 --share-gpus --folder pipe",
             holds=has_trained(6), processes=2),
        Case(name="profile two", words="profile tiny --steps 1 --plan dp=2 --share-gpus --folder prof2",
             holds=said("step_seconds"), processes=2),
        Case(name="check", words=f"check --plan dp=2,tp=2 --steps 1 --device {device}", holds=is_same,
             processes=4),
        Case(name="torchrun", words="-m torch.distributed.run --standalone --nproc-per-node 1 -m shardwise train tiny "
             f"{short} --plan dp=1 --folder torchrun --json", holds=has_trained(6), script=True),
        Case(name="verified steps", words=f"train tiny {short} --plan dp=2 --devices 2 --share-gpus --verify-steps 2 "
             "--folder verified", holds=has_trained(6), processes=2),
        Case(name="launch", words="-m shardwise launch --json --on local --devices-per-node 1 --follow -- train tiny "
             f"{short} --folder launched", holds=has_steps("launched", 6), script=True, gpu_only=True),
        Case(name="probe", words="probe devices --devices 1", holds=said("devices")),
        Case(name="probe two", words="probe --devices 2 --share-gpus --save probed.toml", holds=said("collectives"),
             processes=2),
        Case(name="plan as probed", words="plan gpt2 --cluster probed.toml --batch 2 --sequence 128",
             holds=said("plan"), after=("probe two",), processes=0),
        Case(name="generate", words="generate first --prompt def --save out.jsonl", holds=said("tokens_per_second"),
             after=("nothing left",)),
        Case(name="generate in int4", words="generate qwen3-0.6b --random-weights --weights int4 --kv 1GiB "
             "--max-length 512 --prompt def --save int4.jsonl", holds=said("tokens_per_second"), gpu_only=True),
        Case(name="serve", words="-m tests.gpu.served first --kv 1MiB --kv-host 64MiB", holds=said("served"),
             after=("nothing left",), script=True, needs=("starlette", "uvicorn")),
        Case(name="serve in fp8", words="-m tests.gpu.served qwen3-0.6b --random-weights --weights fp8 --kv 64MiB "
             "--kv-host 1GiB --max-length 512", holds=said("served"), script=True, needs=("starlette", "uvicorn"),
             gpu_only=True),
        Case(name="lost ranks", words="-m tests.gpu.survive", holds=said("survived"), script=True, processes=4),
    ]  # fmt: skip
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        needs = tuple(name for name in ("transformers", "triton") if name in text)
        ranks = max(map(int, re.findall(r"devices=(\d+)", text)), default=1)
        found.append(
            Case(name=f"example {path.stem}", words=str(path), holds=learns, script=True, needs=needs, processes=ranks)
        )
    return found


def run(case: Case, folder: Path, device: str) -> Row:
    """Type one, and look at what came of it."""
    words = case.words.split()
    command = [sys.executable, *words] if case.script else [sys.executable, "-m", "shardwise", *words, "--json"]
    row = Row(name=case.name, command=" ".join(["python" if case.script else "shardwise", *words]))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    # What is not installed but carried along is found from another folder too.
    carried = [str((ROOT / each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *carried])
    variables = {**os.environ, "PYTHONPATH": paths, **hidden}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return replace(row, seconds=LIMIT_SECONDS, problem=f"it was not over after {LIMIT_SECONDS:.0f} s")
    row = replace(row, seconds=round(time.perf_counter() - start, 1))
    last = "\n".join([*done.stderr.splitlines(), *done.stdout.splitlines()][-_LAST_LINES:])
    if done.returncode != case.status:
        return replace(row, problem=f"status {done.returncode}: {last}")
    seen = Seen(folder=folder, device=device, out=done.stdout, err=done.stderr)
    try:
        problem = case.holds(seen)
    except Exception as error:  # What a command has answered may have any shape.
        problem = f"{type(error).__name__}: {error}"
    return replace(row, problem=None if problem is None else f"{problem}; {last}", told=seen.told())


def try_all(
    chosen: Sequence[Case], try_it: Callable[[Case], Row], *, places: int, jobs: int, deadline: float = math.inf
) -> list[Row]:
    """All of them, each after those that it goes on from, those first for which others wait the longest. On the GPU
    are at most so many processes (`places`) at a time. What there was no time for is missing."""
    waiting, done, under_way = longest_chain_first(chosen), dict[str, Row](), dict[Future[Row], Case]()
    names = {case.name for case in chosen}
    with ThreadPoolExecutor(jobs) as threads:
        while True:
            left = places - sum(min(case.processes, places) for case in under_way.values())
            for case in list(waiting):
                before = [name for name in case.after if name in names]
                has_room = len(under_way) < jobs and min(case.processes, places) <= left
                if not has_room or any(name not in done for name in before) or time.monotonic() > deadline:
                    continue
                waiting.remove(case)
                failed = [name for name in before if done[name].problem is not None]
                if failed:
                    row = Row(name=case.name, command=case.words, problem=f"{failed[0]} failed, from which it goes on")
                    under_way[threads.submit(lambda row: row, row)] = replace(case, processes=0)
                    continue
                left -= min(case.processes, places)
                under_way[threads.submit(try_it, case)] = case
            if not under_way:
                return [done[case.name] for case in chosen if case.name in done]
            for each in wait(under_way, return_when=FIRST_COMPLETED).done:
                row = each.result()
                done[under_way.pop(each).name] = row
                print(f"{row.name}: {row.problem or 'passed'}, {row.seconds:.1f} s", flush=True)


def longest_chain_first(chosen: Sequence[Case]) -> list[Case]:
    """By how many come one after the other from a case on, and then by how many processes it has."""
    length: dict[str, int] = {}
    for case in reversed(chosen):  # Cases stand after those that they go on from.
        length[case.name] = 1 + max((length[each.name] for each in chosen if case.name in each.after), default=0)
    return sorted(chosen, key=lambda case: (-length[case.name], -case.processes))


def is_narrow(case: Case) -> bool:
    return case.processes <= NARROW


def wanted(counts: Collection[int] = (), device: str = "cuda") -> list[Case]:
    """What can be tried here, of cases with so many processes."""
    every = [case for case in cases(device) if not counts or case.processes in counts]
    return [case for case in every if _left_out(case, device) is None]


def run_recorded(
    record: Record, counts: Collection[int], places: int, deadline: float, device: str = "cuda"
) -> list[Row]:
    """Try what the record does not have, and again what that goes on from: its folders are gone."""
    every = {case.name: case for case in wanted((), device)}
    chosen = [case.name for case in wanted(counts, device) if f"commands: {case.name}" not in record.rows]
    for name in chosen:  # It grows.
        chosen += [each for each in every[name].after if each in every and each not in chosen]

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

        def try_it(case: Case) -> Row:
            row = run(case, Path(folder), device)
            record.add(f"commands: {row.name}", {**asdict(row), "status": 0 if row.problem is None else 1})
            return row

        todo = [case for name, case in every.items() if name in chosen]
        rows = try_all(todo, try_it, places=places, jobs=_num_jobs(), deadline=deadline)
    for row in rows:
        if f"commands: {row.name}" not in record.rows:  # What it goes on from has failed.
            record.add(f"commands: {row.name}", {**asdict(row), "status": 1})
    return rows


def row_of_all(record: Record) -> list[dict[str, Any]]:
    """One row for all commands, when all have been tried: the sum of their seconds, and those of each."""
    rows = {row["name"]: row for row in record.of("commands")}
    names = [case.name for case in wanted()]
    if any(name not in rows for name in names):
        return []
    seconds = {name: rows[name]["seconds"] for name in names}
    status = max(rows[name]["status"] for name in names)
    return [
        {"part": "commands", "name": "commands", "status": status, "seconds": sum(seconds.values()), "cases": seconds}
    ]


def _num_jobs() -> int:
    return max(1, min(PROCESSES + 2, (os.cpu_count() or 1) // 2))


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--jobs", type=int, default=_num_jobs(), help="how many at a time")
    parser.add_argument("--json", metavar="FILE", help="where the record goes")
    arguments = parser.parse_args(words)
    if arguments.device == "cuda" and not _has_gpu():
        print("no GPU was found: nothing was tried (--device cpu tries the words without one)", file=sys.stderr)
        return 1
    every = [case for case in cases(arguments.device) if arguments.only in case.name]
    left_out = {case.name: why for case in every if (why := _left_out(case, arguments.device)) is not None}
    chosen = [case for case in every if case.name not in left_out]
    with tempfile.TemporaryDirectory() as folder:
        where, places = Path(folder), max([PROCESSES, *(case.processes for case in chosen)])
        rows = try_all(chosen, lambda case: run(case, where, arguments.device), places=places, jobs=arguments.jobs)
    wrong = [row for row in rows if row.problem is not None]
    data: Mapping[str, Any] = {"device": arguments.device, "rows": [asdict(row) for row in rows], "left_out": left_out}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    print(f"{len(rows) - len(wrong)} passed, {len(wrong)} failed, {len(left_out)} skipped")
    return 1 if wrong or not rows else 0


def _left_out(case: Case, device: str) -> str | None:
    lacking = [name for name in case.needs if find_spec(name) is None]
    if lacking:
        return f"{lacking[0]} is not installed"
    return "it is about a GPU" if case.gpu_only and device == "cpu" else None


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
