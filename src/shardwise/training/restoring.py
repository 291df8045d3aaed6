"""The initial state of a run: from the newest copy in memory, the newest checkpoint, or the recipe's subject."""

from typing import NamedTuple

import torch

from shardwise.errors import ShardwiseError
from shardwise.training.balance import Balancer
from shardwise.training.checkpoint.index import clean, find_last, saved_steps
from shardwise.training.checkpoint.parts import Held
from shardwise.training.checkpoint.read import Reader, load, load_random, look_through
from shardwise.training.folder import CHECKPOINTS
from shardwise.training.job import Job
from shardwise.training.precision import LossScale
from shardwise.training.run_copies import Found, RunCopies
from shardwise.training.subject import Subject
from shardwise.training.world import World


class Restored(NamedTuple):
    """The step of the restored state, its source, whether that was a checkpoint of the old format, and the reasons why
    copies could not be read."""

    step: int
    source: str | None = None
    is_old: bool = False
    problems: tuple[str, ...] = ()


def restore(
    job: Job, world: World, held: Held, subject: Subject, scale: LossScale, balancer: Balancer,
    copies: RunCopies | None,
) -> Restored:  # fmt: skip
    """Delete incomplete checkpoints, and load the engine's initial state. Every rank calls this."""
    root = job.folder / CHECKPOINTS
    if world.is_first:
        clean(root)
    # Only the first rank looks, so that all ranks resume from the same checkpoint.
    last = world.first(find_last(root))
    problems: list[str] = []
    if copies is not None:
        since = saved_steps(root)[-1] if world.is_first and last is not None else 0
        for found in world.first(copies.found(since=since) if world.is_first else None):
            problem = _try(found, world, held, scale, balancer, copies)
            if problem is None:
                return Restored(found.generation.step, "memory", problems=tuple(problems))
            problems.append(problem)
    if last is not None:
        with Reader(last) as reader:
            balancer.take(reader.index.extra)
            load(reader, held)
            load_random(reader, world)
            scale.take(reader.index.extra)
            return Restored(reader.index.step, "disk", reader.index.is_old, tuple(problems))
    subject.fill(held)
    torch.manual_seed(job.recipe.seed * 1000 + world.rank)
    return Restored(0, problems=tuple(problems))


def _try(found: Found, world: World, held: Held, scale: LossScale, balancer: Balancer, copies: RunCopies) -> str | None:
    """Load a generation if every rank can read it. Else return a rank's problem; the weights are then undefined."""
    reader: Reader | None = None
    problem: str | None = None
    try:
        reader = copies.reader(found)
        balancer.take(reader.index.extra)
        look_through(reader, held)
        load_random(reader, world, looks_at_all=False)
    except (ShardwiseError, OSError) as error:
        said = error.problem if isinstance(error, ShardwiseError) else str(error)
        problem = f"the copy of step {found.generation.step} is not used: {said}"
    problem = next((each for each in world.gather(problem) if each is not None), None)
    if problem is None and reader is not None:
        with reader:
            load(reader, held)
            scale.take(reader.index.extra)
    return problem
