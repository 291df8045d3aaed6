"""What a run tells of its start and its end: to a person, and to its journal: who computes where, and why it ended."""

import os
from typing import Any

import torch

from shardwise import environment
from shardwise.ranks.rank_error import RankError
from shardwise.trace.journal import note
from shardwise.training.job import Job
from shardwise.training.progress import Progress
from shardwise.training.setup import Setup
from shardwise.training.world import World
from shardwise.units import counted, format_bytes

#: Of an error the first line is kept, and of that so much.
_MOST_LETTERS = 300


def announce(job: Job, world: World, setup: Setup, progress: Progress) -> None:
    """Say what is trained, and on what. Every rank calls it, when all are ready."""
    _note_start(job, world, setup)
    begun = f" from step {setup.step}" if setup.step else ""
    if setup.restored.source == "memory":
        begun += " (a copy in memory)"
    progress.say(
        f"{job.recipe.name}{begun}: {setup.num_parameters / 1e6:.2f} M parameters, "
        f"{format_bytes(setup.data_bytes, decimal=True)} of tokens, plan {job.plan} on "
        f"{world.size} x {world.device.type}, in {job.folder}"
    )
    for problem in filter(None, (*setup.restored.problems, setup.without_copies)):
        progress.warn(problem)
        if world.is_first:
            note(job.folder, "copies", problem=problem)
    if setup.restored.is_old:
        progress.warn(
            "the checkpoint is of an older format, without a checksum of its index: that could be damaged and"
            " nobody would see; those that are saved from now on have one"
        )
    num_gpus, place = torch.cuda.device_count(), environment.place_under_torchrun()
    num_here = world.size if place is None else place[1]
    if world.device.type == "cuda" and num_here > num_gpus:
        progress.say(f"{num_here} ranks share {counted(num_gpus, 'GPU')}: for checking, and slow")


def _note_start(job: Job, world: World, setup: Setup) -> None:
    device = "cpu"
    if world.device.type == "cuda":
        device = f"{world.device} ({torch.cuda.get_device_name(world.device)})"
    place = {"rank": world.rank, "host": environment.node_name(), "process": os.getpid(), "device": device}
    places: list[dict[str, Any]] = world.gather(place)
    if world.is_first:
        restarts = environment.num_restarts() or None
        attempt = environment.find_attempt()
        note(
            job.folder, "start", step=setup.step, source=setup.restored.source, plan=str(job.plan), places=places,
            attempt=attempt, restarts=restarts,
        )  # fmt: skip


def note_end(
    job: Job, world: World, why: str, *, step: int | None = None, is_final: bool = False, error: Exception | None = None
) -> None:
    """It has ended, well or not. `is_final`: it would end so again. Of the first rank's own end the second tells."""
    is_told_by_second = isinstance(error, RankError) and error.rank == 0 and world.rank == 1
    if world.is_first or is_told_by_second:
        line = why.strip().partition("\n")[0] or "an error without a text"
        note(job.folder, "end", step=step, why=line[:_MOST_LETTERS], is_final=is_final or None)
