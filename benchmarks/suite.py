"""How long the tests take, by directory: measured while they run, and kept by the name of a machine.

    python -m pytest -p benchmarks.suite --core-seconds /tmp/after -n auto --dist loadgroup
    python benchmarks/suite.py aarch64=/tmp/after:500

A test's core seconds are those of its worker and of every process that it has started, ranks above all. They hardly
depend on what else a machine is doing; seconds do. The number behind a colon is how many seconds the whole run took.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
NUM_SLOWEST = 20
NUM_FILES = 60


class Row(NamedTuple):
    """One test: its core seconds, its seconds, and its name."""

    core_seconds: float
    seconds: float
    test: str

    @property
    def file(self) -> str:
        """`states/tiers/test_states.py` for `tests/states/tiers/test_states.py::test_...`."""
        return self.test.split("::")[0].removeprefix("tests/")

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0] or "."


def core_seconds() -> float:
    """Of this process up to now, of all that it started and of all that those did, also where they have ended."""
    own, this = time.process_time(), os.getpid()
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 - thousands of times, so it must be quick
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:  # noqa: PTH123
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # It has just ended.
        children.setdefault(int(fields[1]), []).append(int(name))
        # Of this process those that it waited for: its own seconds would have this count of them.
        used[int(name)] = sum(map(int, fields[13 if int(name) == this else 11 : 15]))
    total, left = 0, [this]
    while left:
        process = left.pop()
        total += used.get(process, 0)
        left += children.get(process, [])
    return own + total / TICKS


class Watch:
    """Writes a line for each test of a worker."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._counting = file, 0.0
        self._used = self._count()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start, used = time.perf_counter(), self._used
        found = yield
        self._used = self._count()
        name = item.nodeid.rpartition("@")[0] if "@" in item.nodeid.rpartition("]")[2] else item.nodeid
        self._file.write(f"{self._used - used:.2f}\t{time.perf_counter() - start:.2f}\t{name}\n")
        self._file.flush()
        return found

    def _count(self) -> float:
        """Core seconds up to now, without those of counting: 2 to 6 ms a test, as much as many tests take."""
        start = time.process_time()
        used = core_seconds() - self._counting
        self._counting += time.process_time() - start
        return used


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core-seconds", type=Path, help="where to write what each test took")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--core-seconds")
    is_controller = bool(getattr(config.option, "numprocesses", None))
    if path is not None and not is_controller:
        worker = getattr(config, "workerinput", {"workerid": "alone"})["workerid"]
        config.pluginmanager.register(Watch(path.with_name(f"{path.name}.{worker}").open("w", encoding="utf-8")))


def read(path: Path) -> list[Row]:
    """What the workers of a run have written."""
    rows = []
    for part in sorted(path.parent.glob(f"{path.name}.*")):
        for line in part.read_text(encoding="utf-8").splitlines():
            used, took, test = line.split("\t", 2)
            rows.append(Row(float(used), float(took), test))
    return rows


def summary(rows: list[Row], seconds: float | None) -> dict[str, object]:
    return {
        "seconds": seconds,
        "core_seconds": round(sum(row.core_seconds for row in rows), 1),
        "num_tests": len(rows),
        "by_folder": _by(attrgetter("folder"), rows),
        "by_file": dict(list(_by(attrgetter("file"), rows).items())[:NUM_FILES]),
        "slowest": {row.test: row.core_seconds for row in sorted(rows, reverse=True)[:NUM_SLOWEST]},
    }


def _by(key: Callable[[Row], str], rows: list[Row]) -> dict[str, dict[str, float]]:
    """What the rows of each key cost together, the costliest first."""
    used, counts = Counter[str](), Counter[str]()
    for row in rows:
        used[key(row)] += row.core_seconds  # type: ignore[assignment]
        counts[key(row)] += 1
    return {name: {"core_seconds": round(each, 1), "num_tests": counts[name]} for name, each in used.most_common()}


def main() -> int:
    from record import kept, record

    found: dict[str, object] = {}
    for word in sys.argv[1:]:
        name, _, where = word.partition("=")
        path, _, seconds = where.partition(":")
        found[name] = summary(read(Path(path)), float(seconds) if seconds else None)
    if not found:
        print("nothing to read: python benchmarks/suite.py NAME=FILE:SECONDS ...")
        return 0
    record("suite", {**kept("suite"), **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
