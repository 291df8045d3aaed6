"""All that is tested on GPUs, as one command: `make test-gpu`, or

    python -m tests.gpu                    everything
    python -m tests.gpu --seconds 560      as much as fits; called again, it goes on where it was
    python -m tests.gpu --only faults      one part
    python -m tests.gpu --at-once 1        one thing after the other

Parts: plans (every one in fp32 and bf16, with 2, 4 and 8 ranks), families of Hugging Face, faults (ranks that are
lost), nccl (what ranks ask of it, against what CPUs rehearse), input (bad input), commands (as they are typed) and
pytest (every test file that asks for a GPU; its skips are listed). They run beside each other, as many as there are
cores for their ranks (`schedule.py`, `pieces.py`). What was done is in build/gpu_tests.jsonl, until the source changes,
and what was said in build/gpu_logs. It ends with 0 when all of it has passed, with 3 when there was no time for all,
with 1 when something is wrong. What cannot be run is said. The names of what has failed are the last lines.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.gpu import commands, every_plan, faults, files
from tests.gpu.pieces import LOGS, MOST_RANKS, QUEUES, Room, run_at_once
from tests.gpu.record import FILE, ROOT, Record
from tests.gpu.schedule import BOTH, COUNTS, PARTS, is_done, pieces, recorded, seconds_needed

#: What is run as a module of its own, by the part's name.
MODULES = {"nccl": "nccl_programs", "input": "bad_input"}
#: What a case of a part needs at least to be begun.
_FAULT_SECONDS, _COMMAND_SECONDS = 45.0, 30.0
#: Only the end of the output is seen where a machine is far away: no name or problem may fill it.
_MOST_LETTERS, _MOST_NAMES = 300, 40


@dataclass(slots=True)
class Found:
    """How a part went: how many passed, and what did not, by name."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def run_plans(record: Record, part: str, deadline: float, chosen: argparse.Namespace) -> Found:
    first, step = chosen.share
    wanted = every_plan.wanted_rows(
        with_families=part == "families", counts=chosen.ranks, precisions=chosen.precision, share=(first, step)
    )
    rows, left_out = every_plan.run(record, wanted, deadline)
    wrong = [f"{row.precision} {row.plan} ({row.model}): {row.problem}" for row in rows if row.problem is not None]
    return Found(len(rows) - len(wrong), wrong, left_out)


def run_faults(record: Record, deadline: float, counts: Sequence[int]) -> Found:
    known = {name.removeprefix("faults: ") for name in record.rows if name.startswith("faults: ")}
    for row in faults.cases("cuda", known=known, deadline=deadline - _FAULT_SECONDS, counts=counts):
        print(row, flush=True)
        record.add(f"faults: {row.name}", asdict(row))
    return _found(record, "faults", faults.names(counts))


def run_commands(record: Record, deadline: float, counts: Sequence[int]) -> Found:
    places = max([each for each in counts if each > commands.NARROW], default=commands.PROCESSES)
    names = [case.name for case in commands.wanted(counts)]
    if deadline - _COMMAND_SECONDS > time.monotonic():
        commands.run_recorded(record, counts, places, deadline - _COMMAND_SECONDS)
    for case in commands.cases("cuda"):
        if (not counts or case.processes in counts) and case.name not in names:
            print(f"skipped: {case.name}: it needs {', '.join(case.needs)}")
    return _found(record, "commands", names)


def run_module(record: Record, part: str, deadline: float) -> Found:
    """What is a module of its own, and recorded as a whole."""
    key = f"{part}: {part}"
    if key not in record.rows and time.monotonic() < deadline - recorded().get(key, 60.0) / 2:
        start = time.monotonic()
        status = subprocess.run([sys.executable, "-m", f"tests.gpu.{MODULES[part]}"], cwd=ROOT, check=False).returncode
        record.add(key, {"status": status, "seconds": time.monotonic() - start})
    return _found(record, part, [part])


def run_pytest(record: Record, deadline: float, chosen: Sequence[str]) -> Found:
    if find_spec("pytest") is None:
        return Found(left_out=["all tests of pytest, which is not installed"])
    together = [list(chosen)] if chosen else files.groups(files.files_for_gpus(), recorded())
    for group in together:
        files.run_files(record, group, deadline)
    return _found(record, "pytest", [name for group in together for name in group])


def _found(record: Record, part: str, names: Sequence[str]) -> Found:
    """What the record says of them. What is not in it has not been run, or not to its end."""
    found = Found()
    for name in names:
        row = record.rows.get(f"{part}: {name}")
        if row is None:
            found.left_out.append(name)
        elif (problem := _problem_of(row)) is not None:
            found.failed.append(f"{name}: {problem}")
        else:
            found.passed += 1
    return found


def _problem_of(row: dict[str, Any]) -> str | None:
    if row.get("problem") is not None:
        return str(row["problem"])
    return None if row.get("status", 0) in files.PASSED else f"status {row['status']}"


def run_part(record: Record, part: str, deadline: float, chosen: argparse.Namespace) -> Found:
    if part in ("plans", "families"):
        return run_plans(record, part, deadline, chosen)
    if part == "faults":
        return run_faults(record, deadline, chosen.ranks)
    if part == "commands":
        return run_commands(record, deadline, chosen.processes)
    if part == "pytest":
        return run_pytest(record, deadline, chosen.files)
    return run_module(record, part, deadline)


def summary(found: dict[str, Found], seconds: float) -> str:
    """What failed comes last: of a long output only the end is kept by some."""
    lines = [
        f"{part}: {each.passed} passed, {len(each.failed)} failed, {len(each.left_out)} left out"
        for part, each in found.items()
    ]
    lines.append(f"{seconds:.0f} s")
    for word, names in (
        ("LEFT OUT", [f"{part}: {name}" for part, each in found.items() for name in each.left_out]),
        ("FAILED", [f"{part}: {name}" for part, each in found.items() for name in each.failed]),
    ):
        if not names:
            continue
        lines.append(f"{word}: {len(names)}")
        lines += [f"  {_short(name)}" for name in names[:_MOST_NAMES]]
        if len(names) > _MOST_NAMES:
            lines.append(f"  and {len(names) - _MOST_NAMES} more")
    return "\n".join(lines)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_LETTERS else f"{line[: _MOST_LETTERS // 2]} ... {line[-_MOST_LETTERS // 2 :]}"


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="what is not over by then is ended")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--anew", action="store_true", help="run also what has passed already")
    parser.add_argument("--record", metavar="FILE", default=str(FILE), help="where it is written down")
    parser.add_argument("--at-once", type=int, default=_at_once(), metavar="N", help="processes beside each other")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(COUNTS), help="of plans, faults: ranks (2 4 8)")
    parser.add_argument("--precision", nargs="*", choices=BOTH, default=list(BOTH), help="of plans")
    parser.add_argument("--share", type=int, nargs=2, default=[0, 1], metavar="N", help="of plans: 0 2, the first half")
    parser.add_argument("--processes", type=int, nargs="*", default=[], help="of commands: with how many (all)")
    parser.add_argument("--files", nargs="*", default=[], help="of pytest: which test files, in one process")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    if not torch.cuda.is_available():
        print("no GPU was found: nothing was tried", file=sys.stderr)
        return 1
    start = time.monotonic()
    deadline = start + arguments.seconds
    record = Record(Path(arguments.record), anew=arguments.anew)
    parts = PARTS if arguments.only is None else (arguments.only,)
    if arguments.at_once > 1:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that all pieces are ended too.
        todo = [each for each in pieces(parts, arguments.at_once, record) if not is_done(each, record)]
        room = Room(arguments.at_once, MOST_RANKS * torch.cuda.device_count() * QUEUES)
        run_at_once(todo, room, Path(arguments.record), arguments.seconds, needs=seconds_needed)
        record.read()
        deadline = start  # What is not in the record by now is left out.
    found = {part: run_part(record, part, deadline, arguments) for part in parts}
    wrong, missing = any(each.failed for each in found.values()), any(each.left_out for each in found.values())
    if arguments.at_once > 1 or len(parts) > 1:
        every_plan.write(record)
        print(f"what each piece said is in {LOGS.relative_to(ROOT)}")
        if missing and not wrong:
            print("not all was run: type it again to go on")
    print(summary(found, time.monotonic() - start), flush=True)
    return 1 if wrong else every_plan.NOT_ALL if missing else 0


def _at_once() -> int:
    """A core for each; what GPUs have room for is looked at besides."""
    return min(os.cpu_count() or 1, 16 * torch.cuda.device_count())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
