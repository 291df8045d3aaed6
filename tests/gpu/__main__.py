"""All that is tested on GPUs, as one command: `make test-gpu`, or

    python -m tests.gpu                    everything
    python -m tests.gpu --seconds 560      as much as fits; called again, it goes on where it was
    python -m tests.gpu --only faults      one part
    python -m tests.gpu --at-once 1        one thing after the other

Parts: plans (every one in fp32 and bf16, with 2, 4 and 8 ranks), families of Hugging Face, faults (ranks that are
lost), nccl (what ranks ask of it, against what CPUs rehearse), input (bad input), commands (as they are typed) and
pytest (every test file that asks for a GPU; its skips are listed). They run beside each other, as many as there are
cores for their ranks (`pieces.py`). What was done is in build/gpu_tests.jsonl, until the source changes. It ends with 0
when all of it has passed, with 3 when there was no time for all, with 1 when something is wrong. What cannot be run is
said.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.gpu import commands, every_plan, faults
from tests.gpu.page import RECORD
from tests.gpu.pieces import Piece, run_at_once
from tests.gpu.record import FILE, ROOT, Record

PARTS = ("plans", "families", "faults", "nccl", "input", "commands", "pytest")
#: What is run as a module of its own, by the part's name.
MODULES = {"nccl": "nccl_programs", "input": "bad_input", "commands": "commands"}
#: What a test file has that does something on a GPU alone.
_ON_A_GPU = ("cuda.is_available()", "needs a GPU")
#: What a part needs at least to be begun, beside the first.
_SECONDS = {"faults": 60.0, "nccl": 180.0, "input": 150.0, "commands": 240.0, "pytest": 120.0}


def pieces(parts: Sequence[str]) -> list[Piece]:
    """What runs beside each other, the longest first, each with how many processes it has at a time."""

    def of_plans(ranks: int, precision: str) -> Piece:
        return Piece("plans", ranks, ("--ranks", str(ranks), "--precision", precision))

    files = [Piece("pytest", _num_processes(name), ("--files", name)) for name in _longest_first(files_for_gpus())]
    every = [Piece("commands", commands.PROCESSES), files.pop(0), Piece("plans", 8, ("--ranks", "8"))]
    every += [Piece("faults", 4), Piece("nccl", 4)]
    every += [of_plans(ranks, precision) for ranks in (4, 2) for precision in ("fp32", "bf16")]
    every += [Piece("families", 2, ("--precision", precision)) for precision in ("fp32", "bf16")]
    every += [Piece("input", 2), *files]
    return [each for each in every if each.part in parts]


def is_done(piece: Piece, record: Record) -> bool:
    """Whether the record has all of it: to begin a piece only to find that costs seconds of every call."""
    if piece.part in ("plans", "families"):
        counts = [int(each) for each in piece.values("--ranks")] or (2, 4, 8)
        precisions = piece.values("--precision") or ("fp32", "bf16")
        wanted = every_plan.wanted_rows(
            with_families=piece.part == "families", counts=counts, precisions=precisions, only=""
        )
        return all(row.name in record.rows for row in wanted)
    if piece.part == "faults":
        return len(record.of("faults")) == faults.num_cases()
    return all(f"{piece.part}: {name}" in record.rows for name in piece.values("--files") or (piece.part,))


def _longest_first(files: Sequence[str]) -> list[str]:
    """By how long they took in the run that docs/gpu.md is made from; new ones at the end."""
    seconds = _recorded_seconds()
    return sorted(files, key=lambda name: -seconds.get(name, 0.0))


@cache
def _recorded_seconds() -> dict[str, float]:
    others = json.loads(RECORD.read_text(encoding="utf-8"))["others"] if RECORD.exists() else []
    return {row["name"]: row["seconds"] for row in others}


def _seconds_for(part: str, name: str) -> float:
    """What is left at least when it is begun: for a test file half as much again as it took, where that is known, and
    at most a minute more: the longest one would have no room in a call of ten minutes."""
    known = _recorded_seconds().get(name) if part == "pytest" else None
    return _SECONDS[part] if known is None else min(1.5 * known, known + 60.0)


def _seconds_of(piece: Piece) -> float:
    """What is left at least when it is begun. Plans go one by one, so some of them are done in any time."""
    if piece.part in ("plans", "families"):
        return 30.0
    return max(_seconds_for(piece.part, name) for name in piece.values("--files") or (piece.part,))


def _num_processes(name: str) -> int:
    """How many a test file has at a time; all that there may be, where it asks what the GPU does by itself."""
    if name == "tests/explain/doctor/test_gpu_real.py":
        return _at_once()
    return 1 if name.startswith(("tests/kernels/", "tests/nets/", "tests/dataflow/")) else 2


def run_plans(
    record: Record,
    part: str,
    deadline: float,
    *,
    counts: Sequence[int] = (2, 4, 8),
    precisions: Sequence[str] = ("fp32", "bf16"),
) -> tuple[int, int, int]:
    """How many plans passed, failed, and were left out."""
    wanted = every_plan.wanted_rows(with_families=part == "families", counts=counts, precisions=precisions, only="")
    rows, left_out = every_plan.run(record, wanted, deadline)
    for each in left_out:
        print(f"left out: {each}")
    wrong = [row for row in rows if row.problem is not None]
    for row in wrong:
        print(f"failed: {row.precision} {row.plan} ({row.model}): {row.problem}")
    return len(rows) - len(wrong), len(wrong), len(left_out)


def run_faults(record: Record, deadline: float) -> tuple[int, int, int]:
    known = {name.removeprefix("faults: ") for name in record.rows if name.startswith("faults: ")}
    for row in faults.cases("cuda", known=known, deadline=deadline - _SECONDS["faults"]):
        print(row, flush=True)
        record.add(f"faults: {row.name}", asdict(row))
    rows = record.of("faults")
    wrong = sum(row["problem"] is not None for row in rows)
    return len(rows) - wrong, wrong, faults.num_cases() - len(rows)


def run_commands(record: Record, part: str, deadline: float, *, files: Sequence[str] = ()) -> tuple[int, int, int]:
    """What is a module of its own, or the tests of pytest, one file after the other."""
    typed = {part: [sys.executable, "-m", f"tests.gpu.{MODULES.get(part, part)}"]}
    if part == "pytest":
        if find_spec("pytest") is None:
            print("left out: all tests of pytest, which is not installed")
            return 0, 0, 1
        typed = {
            name: [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "no:benchmark", name]
            for name in files or files_for_gpus()
        }
    passed = failed = left_out = 0
    for name, command in typed.items():
        key = f"{part}: {name}"
        if key not in record.rows:
            if time.monotonic() > deadline - _seconds_for(part, name):
                print(f"left out: {name}: no time was left")
                left_out += 1
                continue
            start = time.monotonic()
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
            record.add(key, {"status": status, "seconds": time.monotonic() - start})
        passed, failed = (passed + 1, failed) if record.rows[key]["status"] == 0 else (passed, failed + 1)
    return passed, failed, left_out


def files_for_gpus() -> list[str]:
    """Every test file that has something for a GPU, by its name, its folder or by what it asks for."""
    every = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "gpu"]
    return sorted(
        str(path.relative_to(ROOT))
        for path in every
        if path.name.startswith("test_gpu")
        or path.parent == ROOT / "tests" / "kernels"
        or any(word in path.read_text(encoding="utf-8") for word in _ON_A_GPU)
    )


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="nothing is begun that may take longer")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--anew", action="store_true", help="run also what has passed already")
    parser.add_argument("--record", metavar="FILE", default=str(FILE), help="where it is written down")
    parser.add_argument("--at-once", type=int, default=_at_once(), metavar="N", help="processes beside each other")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8], help="of plans: how many ranks (2 4 8)")
    parser.add_argument("--precision", nargs="*", choices=("fp32", "bf16"), default=["fp32", "bf16"], help="of plans")
    parser.add_argument("--files", nargs="*", default=[], help="of pytest: which test files")
    arguments = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("no GPU was found: nothing was tried", file=sys.stderr)
        return 1
    start = time.monotonic()
    deadline = start + arguments.seconds
    record = Record(Path(arguments.record), anew=arguments.anew)
    parts = PARTS if arguments.only is None else (arguments.only,)
    if arguments.at_once > 1:
        todo = [each for each in pieces(parts) if not is_done(each, record)]
        run_at_once(todo, arguments.at_once, Path(arguments.record), arguments.seconds, needs=_seconds_of)
        record.read()
        deadline = start  # What is not in the record by now is left out.
    told, wrong, missing = [], 0, 0
    for part in parts:
        if part in ("plans", "families"):
            found = run_plans(record, part, deadline, counts=arguments.ranks, precisions=arguments.precision)
        elif part == "faults":
            found = run_faults(record, deadline)
        else:
            found = run_commands(record, part, deadline, files=arguments.files)
        told.append(f"{part}: {found[0]} passed, {found[1]} failed, {found[2]} left out")
        wrong, missing = wrong + found[1], missing + found[2]
    print("\n".join(told), f"\n{time.monotonic() - start:.0f} s", flush=True)
    if arguments.at_once > 1 or len(parts) > 1:
        every_plan.write(record)
        if missing and not wrong:
            print("not all was run: type it again to go on")
    return 1 if wrong else every_plan.NOT_ALL if missing else 0


def _at_once() -> int:
    """A GPU has queues for 14 processes of 32; of 16 and more its driver said that it is out of memory (H200, 24 of 141
    GB in use)."""
    return min(os.cpu_count() or 1, 14 * torch.cuda.device_count())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
