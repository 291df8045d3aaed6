"""Each command typed as a user types it, on the GPU of this machine: whether it works, and what it says if not.

    python -m tests.gpu.commands                     about 2 minutes on an H200 with 16 cores
    python -m tests.gpu.commands --only train --jobs 1
    python -m tests.gpu.commands --device cpu        the same words without a GPU: that this script is right

Every command is a process of its own, several at a time; one that goes on from another's folder waits for it. It ends
with status 1 if one of them fails. Nothing is installed; what is left out is said.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.gpu.pieces import Room
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
#: On a GPU at a time: as many as the largest case has.
PROCESSES = 8
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
             after=("nothing left",)),
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
             after=("profile",)),
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
             holds=said("plan"), after=("probe two",)),
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


def try_all(chosen: Sequence[Case], folder: Path, device: str, jobs: int) -> list[Row]:
    """All of them, each after those that it goes on from."""
    under_way: dict[str, Future[Row]] = {}
    room = Room(PROCESSES)

    def after_others(case: Case) -> Row:
        before = [under_way[name].result() for name in case.after if name in under_way]
        failed = [each.name for each in before if each.problem is not None]
        if failed:
            return Row(name=case.name, command=case.words, problem=f"{failed[0]} failed, from which it goes on")
        with room.places(case.processes):
            row = run(case, folder, device)
        print(f"{row.name}: {row.problem or 'passed'}, {row.seconds:.1f} s", flush=True)
        return row

    # Cases stand after those that they wait for, so those have been begun: nobody waits for a thread in vain.
    with ThreadPoolExecutor(jobs) as threads:
        for case in chosen:
            under_way[case.name] = threads.submit(after_others, case)
        return [each.result() for each in under_way.values()]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(6, (os.cpu_count() or 1) // 2)), help="how many at a time"
    )
    parser.add_argument("--json", metavar="FILE", help="where the record goes")
    arguments = parser.parse_args(words)
    if arguments.device == "cuda" and not _has_gpu():
        print("no GPU was found: nothing was tried (--device cpu tries the words without one)", file=sys.stderr)
        return 1
    every = [case for case in cases(arguments.device) if arguments.only in case.name]
    left_out = {case.name: why for case in every if (why := _left_out(case, arguments.device)) is not None}
    chosen = [case for case in every if case.name not in left_out]
    with tempfile.TemporaryDirectory() as folder:
        rows = try_all(chosen, Path(folder), arguments.device, arguments.jobs)
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
