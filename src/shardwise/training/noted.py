"""The start and the end of a run, printed and written to its journal: which rank runs where, and why the run ended."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from shardwise import environment
from shardwise.ranks.pulse import end_stopped
from shardwise.trace.journal import note
from shardwise.training.job import Job
from shardwise.training.progress import Progress
from shardwise.training.setup import Setup
from shardwise.training.world import World
from shardwise.units import counted, format_bytes

#: The journal keeps this many characters of an error's first line.
_MOST_LETTERS = 300
#: After a hang, the journal keeps where each rank stood, for at most this many ranks.
_MOST_PLACES = 64


def announce(job: Job, world: World, setup: Setup, progress: Progress) -> None:
    """Print what is trained, and on which devices. Every rank calls this, once all are ready."""
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
    job: Job, world: World, why: str, *,
    step: int | None = None, is_final: bool = False, leave_out: Sequence[str] = (), take_in: Sequence[str] = (),
    lost: int | None = None,
) -> None:  # fmt: skip
    """Write the end of a run to its journal. `is_final`: a restart would end the same way. `leave_out` are hosts to
    exclude from the next start; `take_in` are hosts that the run stopped for, in order to continue with them.

    Rank 0 writes, or rank 1 if rank 0 is the `lost` one.
    """
    if lost is not None and lost != world.rank:
        end_stopped(lost)
    if world.rank != (1 if lost == 0 else 0):
        return
    line, *more = why.strip().splitlines() or ["an error without a text"]
    # The report of a hang says where each rank stood. The lines after these are a traceback.
    places = [each.strip() for each in more if each.strip().startswith("rank ")]
    note(
        job.folder, "end", step=step, why=line[:_MOST_LETTERS], is_final=is_final or None,
        leave_out=list(leave_out) or None, take_in=list(take_in) or None,
        places=[each[:_MOST_LETTERS] for each in places[:_MOST_PLACES]] or None,
    )  # fmt: skip
