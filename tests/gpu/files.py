"""Test files that want a GPU: which there are, which of them share a process, and how they are run.

To start Python, torch and CUDA takes a test file 8 to 13 s. So short ones are run in groups, each by one pytest, which
records every file by itself (`per_file.py`). A file that ends the process is recorded as failed, and those behind it
are run by another. One that fails beside others is tried again alone: what it says then counts, and that it failed
before is said in its row.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.gpu.record import ROOT, Record

#: What a test file has that does something on a GPU alone.
_ON_A_GPU = ("cuda.is_available()", "needs a GPU")
#: Files that start ranks on the GPU, and how many. They are run apart.
RANKS = {
    "tests/engine/test_gpu.py": 2,
    "tests/engine/test_gpu_four_ranks.py": 4,
    "tests/engine/test_gpu_eight_ranks.py": 8,
    "tests/execution/test_gpu_streams.py": 2,
}
#: What three of them take, about: until a run has recorded them, the first is known as all three in one file (397 s).
GUESSED_SECONDS = {
    "tests/engine/test_gpu.py": 200.0,
    "tests/engine/test_gpu_four_ranks.py": 150.0,
    "tests/engine/test_gpu_eight_ranks.py": 50.0,
}
#: It asks what the GPU does by itself.
WHOLE_GPU = "tests/explain/doctor/test_gpu_real.py"
#: A file that takes longer is run apart; one of which nothing is known takes about so long.
_LONG_SECONDS, _UNKNOWN_SECONDS = 60.0, 25.0
#: What a file takes less beside others than by itself.
START_SECONDS = 9.0
NUM_GROUPS = 6
#: What pytest ends with where all is well, and where there is nothing to run.
PASSED = (0, 5)
#: To begin another pytest for less is not worth it.
_LEAST_SECONDS = 15.0
_BESIDE = "failed beside other files in one process, passed alone"


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


def seconds_of(files: Sequence[str], recorded: Mapping[str, float]) -> float:
    """What one pytest takes for all of them. Each was recorded with a start of its own, or without."""
    own = [max(recorded.get(name, _UNKNOWN_SECONDS) - START_SECONDS, 2.0) for name in files]
    return START_SECONDS + sum(own)


def groups(files: Sequence[str], recorded: Mapping[str, float]) -> list[list[str]]:
    """Which files share a process: long ones, and those that start ranks, are alone."""
    alone = [name for name in files if name in RANKS or name == WHOLE_GPU or recorded.get(name, 0.0) > _LONG_SECONDS]
    short = sorted(set(files) - set(alone), key=lambda name: (-recorded.get(name, _UNKNOWN_SECONDS), name))
    found: list[list[str]] = [[] for _ in range(min(NUM_GROUPS, len(short)))]
    for name in short:
        min(found, key=lambda group: seconds_of(group, recorded) if group else 0.0).append(name)
    return [*([name] for name in alone), *found]


def run_files(record: Record, files: Sequence[str], deadline: float, *, root: Path = ROOT) -> None:
    """Run those that the record does not have."""
    todo = [name for name in files if f"pytest: {name}" not in record.rows]
    if find_spec("pytest") is None:
        return
    _run_together(record, todo, deadline, root)
    failed = [name for name in todo if _status(record, name) not in (None, *PASSED)]
    for name in failed if len(todo) > 1 else ():
        if time.monotonic() > deadline - _LEAST_SECONDS:
            return
        print(f"{name} failed beside other files: it is tried again, alone", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            alone = Record(Path(folder) / "record", known=record.about)
            _run_together(alone, [name], deadline, root)
        if _status(alone, name) in PASSED:
            record.add(f"pytest: {name}", {**alone.rows[f"pytest: {name}"], "since": _BESIDE})


def _status(record: Record, name: str) -> int | None:
    row = record.rows.get(f"pytest: {name}")
    return None if row is None else int(row["status"])


def _run_together(record: Record, files: Sequence[str], deadline: float, root: Path) -> None:
    """In as few processes as can be: a new one after each that has died."""
    left = list(files)
    while left and time.monotonic() < deadline - _LEAST_SECONDS:
        status, begun = _run_pytest(record, left, deadline, root)
        record.read()
        rest = [name for name in left if _status(record, name) is None]
        if rest and time.monotonic() < deadline:
            if begun not in rest and len(left) > 1:  # It has died between files, or before the first.
                for name in rest:
                    _run_together(record, [name], deadline, root)
                return
            blamed = begun if begun in rest else rest[0]
            print(f"{blamed}: pytest ended with status {status} before it was over", flush=True)
            record.add(f"pytest: {blamed}", {"status": status or 1, "seconds": 0.0})
            rest.remove(blamed)
        left = rest


def _run_pytest(record: Record, files: Sequence[str], deadline: float, root: Path) -> tuple[int, str]:
    """The status of a process for these files, and in which it was last."""
    with tempfile.TemporaryDirectory() as name:
        order, begun = Path(name) / "order.json", Path(name) / "begun"
        last = min(deadline, time.monotonic() + 1e6)  # JSON has no infinity.
        told = {"record": str(record.path.resolve()), "about": record.about, "files": list(files), "begun": str(begun)}
        order.write_text(json.dumps({**told, "deadline": last}), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "--continue-on-collection-errors"]
        command += ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "tests.gpu.per_file"]
        # A path by itself would be one of those by which pytest looks for its settings.
        command += [f"--rootdir={root}", f"--per-file={order}", *files]
        status = subprocess.run(command, cwd=root, check=False).returncode
        return status, begun.read_text(encoding="utf-8") if begun.exists() else ""
