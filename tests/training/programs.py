"""What ranks do in these tests, and the small jobs that they do it with."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.planner.plan import Plan
from shardwise.trace.metrics import read_metrics
from shardwise.training.checkpoint.index import find_last
from shardwise.training.checkpoint.read import Reader, load
from shardwise.training.folder import CHECKPOINTS
from shardwise.training.job import Job
from shardwise.training.recipe import get_recipe
from shardwise.training.setup import make_ready
from shardwise.training.world import World

#: No rate depends on how long a run is, so that one that was stopped has the same.
STEADY = {
    "optimizer.schedule": "constant",
    "optimizer.warmup": 0,
    "evaluation.every": 0,
    "evaluation.sample": 0,
    "checkpoint.every": 0,
    "data.limit_bytes": 40_000,
}


def make_job(folder: Path, plan: str, **changes: Any) -> Job:
    entries = {**STEADY, **{key.replace("__", "."): value for key, value in changes.items()}}
    recipe = get_recipe("tiny").changed(entries, source="the test")
    return Job(recipe=recipe, plan=Plan.parse(plan), folder=folder, command="a test")


def losses_of(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def saved_state(folder: Path) -> dict[str, Tensor]:
    """Everything in the last checkpoint, whole, but for random numbers."""
    last = find_last(folder / CHECKPOINTS)
    assert last is not None, f"no checkpoint in {folder}"
    with Reader(last) as reader:
        names = [name for name in reader.index.entries if not name.startswith("random/")]
        return {name: reader.whole(name).clone() for name in names}


def loaded_state(job: Job) -> tuple[dict[str, Tensor], int, int, bool]:
    """The state of an engine that has read the last checkpoint, whole, under the names of a checkpoint; the bytes that
    were read and kept; and whether the random numbers are those that were saved."""
    world = World()
    setup = make_ready(job, world)
    is_same = False
    last = find_last(job.folder / CHECKPOINTS)
    assert last is not None, "a checkpoint was made before"
    with Reader(last) as reader:
        load(reader, setup.held)
        entry = f"random/cpu/{world.rank}"
        is_same = entry in reader.index.entries and torch.equal(reader.whole(entry), torch.get_rng_state())
    found: dict[str, Tensor] = dict(setup.engine.state_dict())
    for name, state in setup.engine.optimizer_state_dict()["state"].items():
        found |= {f"optimizer/{key}/{name}": torch.as_tensor(value) for key, value in state.items()}
    setup.engine.close()
    world.close()
    return found, reader.bytes_read, reader.bytes_kept, is_same
