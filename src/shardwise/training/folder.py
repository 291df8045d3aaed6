"""The folder of a run: its configuration, its history, and everything needed to repeat it.

RUN/
    recipe.toml     what is trained
    plan.toml       the plan, with reasons
    manifest.json   versions, hardware, seed, digest of the data, command
    metrics.jsonl   a line for each step, and for each evaluation
    journal.jsonl   a line for each start and end
    tensorboard/    the same for TensorBoard, if the recipe asks for it
    trace.json      one step, on all ranks
    checkpoints/    the latest ones
    lock            the owner of the folder, while the run is trained
    report.html     the report page
"""

import platform
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from shardwise import environment
from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.output import write_whole
from shardwise.planner.plan import Plan
from shardwise.schedule.replay import predict
from shardwise.trace.events import Trace
from shardwise.trace.run import Run, load_run, save_run
from shardwise.training.job import Job
from shardwise.training.lock import RunLock
from shardwise.training.recipe import Recipe, read_recipe

RECIPE, PLAN, MANIFEST = "recipe.toml", "plan.toml", "manifest.json"
TENSORBOARD, CHECKPOINTS = "tensorboard", "checkpoints"
#: Keys of a recipe, or prefixes of keys, that may change when a run is resumed: its length, how often it logs, and
#: settings that do not change results.
_MAY_CHANGE = (
    "name", "steps", "log", "tensorboard", "compile", "kernels", "graphs", "bucket_bytes", "balance.place_every",
    "checkpoint", "evaluation",
)  # fmt: skip
_PACKAGES = ("shardwise", "torch", "numpy", "safetensors")


def new_folder(recipe: Recipe) -> Path:
    """Return a new folder for a run without `--folder`."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    tails = chain([""], (f"-{number}" for number in count(2)))
    return next(path for tail in tails if not (path := Path("runs") / f"{recipe.name}-{stamp}{tail}").exists())


def check_same(folder: Path, recipe: Recipe) -> None:
    """Refuse to resume a run with another recipe."""
    if not (folder / RECIPE).is_file():
        return
    before = read_recipe(folder / RECIPE)
    other = {key: both for key, both in recipe.differing(before).items() if not key.startswith(_MAY_CHANGE)}
    if other:
        said = ", ".join(f"{key}={here} (there {there})" for key, (here, there) in other.items())
        raise ShardwiseError(
            f"the run in {folder} has another recipe: {said}", remedy="another --folder, or the recipe of this one"
        )


def make_folder(folder: Path) -> None:
    """Make the folder if it does not exist, and check that it is writable."""
    with os_errors_as(f"the folder {folder} cannot be written to", remedy="another --folder"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink(missing_ok=True)


def own_folder(folder: Path, *, is_owner: bool) -> AbstractContextManager[object]:
    """Return a context in which no other run writes to the folder, if this process owns it for all ranks.

    The owner is the process that starts the ranks, or under `torchrun` the first rank.
    """
    return RunLock(folder) if is_owner else nullcontext()


def write_recipe_and_plan(folder: Path, recipe: Recipe, plan: Plan) -> None:
    for name, text in ((RECIPE, recipe.to_toml()), (PLAN, plan.to_toml())):
        with os_errors_as(f"{folder / name} cannot be written", remedy="room on its disk, or another --folder"):
            write_whole(folder / name, text)


def manifest_of(job: Job, data: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return enough to repeat the run. The report shows the entries at the top that are not tables."""
    recipe = job.recipe
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    processor = environment.processor_name()
    return {
        "command": job.command,
        "recipe": recipe.name,
        "plan": str(job.plan),
        "num_ranks": num_ranks,
        "seed": recipe.seed,
        "batch": recipe.batch,
        "precision": job.plan.precision,
        "compiled": job.compile,
        "data_digest": data["digest"],
        "device": f"{num_ranks} x {gpu.name}" if gpu else f"{num_ranks} processes on {processor}",
        **({"device_memory_bytes": gpu.total_memory} if gpu else {}),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": dict(data),
        "versions": environment.versions_of(_PACKAGES),
        "hardware": {"processor": processor, "cores": environment.num_cores(), "machine": platform.machine()},
        "system": f"{platform.system()} {platform.release()}",
    }


def save_step(job: Job, trace: Trace, manifest: Mapping[str, Any]) -> Run:
    """Write one step of a run, measured and predicted, and return it as reports and the doctor read it."""
    run = Run(name=job.folder.name, trace=trace, predicted=predict(trace))
    save_run(run, job.folder, plan=job.plan.to_toml(), manifest=manifest)
    return load_run(job.folder)
