"""A plugin of pytest that records how each test file went, as soon as it is over: many files in one process.

    python -m pytest -p tests.gpu.per_file --per-file ORDER.json FILE ...

The order (`tests/gpu/files.py` writes it) says where the record is, and in which file the one is named that is being
run: whoever started pytest reads that where the process has died. A file of which nothing is recorded has not been run
to its end.
"""

import gc
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.record import Record

FAILED, BROKEN, EMPTY = 1, 2, 5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--per-file", metavar="ORDER.json", default="", help="record each file's result")


def pytest_configure(config: pytest.Config) -> None:
    where = config.getoption("--per-file")
    if where:
        config.pluginmanager.register(PerFile(json.loads(Path(where).read_text(encoding="utf-8"))), "per file")


class PerFile:
    """Writes a row for each file of which all tests are over. `left` are those to come, by file."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._record = Record(Path(order["record"]), known=order["about"])
        self._files: list[str] = order["files"]
        self._begun, self._deadline = Path(order["begun"]), float(order["deadline"])
        self._left: Counter[str] = Counter()
        self._failed: dict[str, int] = {}
        self._starts: dict[str, float] = {}
        self._session: pytest.Session | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[_file_of(report.nodeid)] = BROKEN

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session = session
        self._left = Counter(_file_of(item.nodeid) for item in session.items)
        for name in self._files:
            if not self._left[name]:
                self._add(name, self._failed.get(name, EMPTY))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        name = _file_of(nodeid)
        if name not in self._starts:
            self._starts[name] = time.monotonic()
            self._begun.write_text(name, encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(_file_of(report.nodeid), FAILED)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        name = _file_of(nodeid)
        self._left[name] -= 1
        if self._left[name]:
            return
        self._add(name, self._failed.get(name, 0))
        _clean_up()
        if time.monotonic() > self._deadline and self._session is not None:
            self._session.shouldstop = "no time is left for another file"

    def _add(self, name: str, status: int) -> None:
        seconds = time.monotonic() - self._starts.get(name, time.monotonic())
        self._record.add(f"pytest: {name}", {"status": status, "seconds": seconds})


def _clean_up() -> None:
    """The next file begins with an empty GPU, and with nothing compiled: compilers give up after some variants."""
    if "torch._dynamo" in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It imports what torch calls deprecated; a warning here would end pytest.
            sys.modules["torch._dynamo"].reset()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _file_of(node: str) -> str:
    return node.partition("::")[0]
