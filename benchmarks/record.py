"""Keeps the results of a benchmark: `benchmarks/results/NAME.json`, with the day, the hardware and the versions."""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import shardwise
from shardwise import environment

_RESULTS = Path(__file__).parent / "results"


def record(name: str, results: Mapping[str, object]) -> Path:
    """Write the results of this run over those of the last and return the file."""
    path = _RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    run = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"processor": environment.processor_name(), "cores": environment.num_cores()},
        # Whether anything else was going on: processes that wanted to run, over the last 1, 5 and 15 minutes.
        "load": [round(each, 1) for each in os.getloadavg()],
        "versions": {"shardwise": shardwise.__version__, **environment.versions_of(("numpy", "torch"))},
        "results": results,
    }
    path.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    print(f"kept in benchmarks/results/{path.name}")
    return path


def kept(name: str) -> dict[str, object]:
    """The results that are kept of earlier runs, for a benchmark whose cases are measured one at a time."""
    path = _RESULTS / f"{name}.json"
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    return found
