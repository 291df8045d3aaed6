"""Keeps the results of a benchmark: `benchmarks/results/NAME.json`, with the day, the hardware and the versions."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import shardwise

_RESULTS = Path(__file__).parent / "results"


def record(name: str, results: Mapping[str, object]) -> Path:
    """Write the results of this run over those of the last and return the file."""
    path = _RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    run = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"processor": _processor(), "cores": os.cpu_count()},
        # Whether anything else was going on: processes that wanted to run, over the last 1, 5 and 15 minutes.
        "load": [round(each, 1) for each in os.getloadavg()],
        "versions": {"shardwise": shardwise.__version__, "python": platform.python_version(), **_packages()},
        "results": results,
    }
    path.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    print(f"kept in benchmarks/results/{path.name}")
    return path


def _processor() -> str:
    """What the processor calls itself; on Arm, where it has no name, its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _packages() -> dict[str, str]:
    found = {}
    for package in ("numpy", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
