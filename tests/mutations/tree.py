"""A copy of the library and its tests, in which one fault at a time is made and a few tests are run."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from shardwise import environment
from tests.mutations.fault import Fault

_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "runs")
_NOTICED = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", re.MULTILINE)
#: What pytest returns when all passed, and when some failed. All else is a mistake in what it was told.
_PASSED, _FAILED = 0, 1


class Outcome(NamedTuple):
    """How a run of tests ended. `status` is pytest's, None if it was out of time; `noticed` are those that failed."""

    status: int | None
    noticed: tuple[str, ...]
    seconds: float
    tail: str

    @property
    def passed(self) -> bool:
        return self.status == _PASSED

    @property
    def failed(self) -> bool:
        return self.status == _FAILED


class Tree:
    """One copy. Jobs that run at the same time have one each."""

    def __init__(self, source: Path, target: Path) -> None:
        shutil.copytree(source, target, ignore=_LEFT_OUT, symlinks=True)
        self.root = target

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Where the library has the fault."""
        path = self.root / fault.file
        before = path.read_text(encoding="utf-8")
        _write(path, fault.applied_to(before))
        try:
            yield
        finally:
            _write(path, before)

    def run(self, tests: Sequence[str], *, limit_seconds: float, stops: bool = True) -> Outcome:
        """Run tests, one after the other; `stops` at the first that fails."""
        options = ["-q", "-p", "no:cacheprovider", "--tb=line", "-rfE", *(["-x"] if stops else [])]
        variables = environment.all_variables() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.root / "src")}
        start = perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *dict.fromkeys(tests)],
            cwd=self.root,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            told, _ = process.communicate(timeout=limit_seconds)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            told, _ = process.communicate()
            status = None
        return Outcome(status, tuple(_NOTICED.findall(told)), perf_counter() - start, told[-2000:])


def _write(path: Path, text: str) -> None:
    """Write a source, and let nobody take what was compiled of the one before for it."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
