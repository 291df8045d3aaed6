"""The folder of a run: what it was, what happened in it, and what is needed to run it again.

RUN/
    recipe.toml     what is trained
    plan.toml       how it was spread, with reasons
    manifest.json   versions, hardware, seed, digest of the data, command
    metrics.jsonl   a line for each step, and for each evaluation
    trace.json      one step, on all ranks
    checkpoints/    the last ones
    report.html     all of it as a page
"""

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from shardwise import environment
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.training.recipe import Recipe, read_recipe

RECIPE, PLAN, MANIFEST, METRICS, CHECKPOINTS = (
    "recipe.toml",
    "plan.toml",
    "manifest.json",
    "metrics.jsonl",
    "checkpoints",
)
_PACKAGES = ("shardwise", "torch", "numpy", "safetensors")


def new_folder(recipe: Recipe) -> Path:
    """A place for a run that was given none."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path("runs") / f"{recipe.name}-{stamp}"
    number = 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{recipe.name}-{stamp}-{number}"
    return path


def check_same(folder: Path, recipe: Recipe) -> None:
    """Refuse to go on with a run under another recipe. How long it goes, and how often it speaks, may change."""
    if not (folder / RECIPE).is_file():
        return
    before = read_recipe(folder / RECIPE)
    may_change = ("name", "steps", "log", "checkpoint.", "evaluation.")
    other = {key: both for key, both in recipe.differing(before).items() if not key.startswith(may_change)}
    if other:
        said = ", ".join(f"{key}={here} (there {there})" for key, (here, there) in other.items())
        raise ShardwiseError(
            f"the run in {folder} has another recipe: {said}", remedy="another --folder, or the recipe of this one"
        )


def write_plan(folder: Path, plan: Plan) -> None:
    (folder / PLAN).write_text(plan.to_toml(), encoding="utf-8")


def manifest_of(recipe: Recipe, plan: Plan, *, command: str, data: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Enough to run it again. Plain entries at the top are what the report shows."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "command": command,
        "recipe": recipe.name,
        "plan": str(plan),
        "num_ranks": num_ranks,
        "seed": recipe.seed,
        "precision": recipe.precision,
        "data_digest": data["digest"],
        "device": f"{num_ranks} x {gpu.name}" if gpu else f"{num_ranks} processes on {_processor()}",
        **({"memory_bytes": gpu.total_memory} if gpu else {}),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": dict(data),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {"processor": _processor(), "cores": environment.num_cores(), "machine": platform.machine()},
        "system": f"{platform.system()} {platform.release()}",
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


class Metrics:
    """`metrics.jsonl`. A run that goes on keeps the lines of the steps before, and writes those after anew."""

    def __init__(self, path: Path, *, after: int) -> None:
        kept = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= after:
                        kept.append(line)
                except (ValueError, KeyError):
                    break  # A line that a kill cut short is the last.
        beside = path.with_name(path.name + ".part")
        beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        beside.rename(path)
        self._file = path.open("a", encoding="utf-8")

    def add(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run."""
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
