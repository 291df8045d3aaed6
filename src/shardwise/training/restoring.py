"""The first numbers of a run: of the newest copy in memory, of the newest checkpoint, or of the recipe's subject."""

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
    """How many steps the numbers have had, where they come from, whether that was a checkpoint of the old format; and
    of copies that could not be read, why."""

    step: int
    source: str | None = None
    is_old: bool = False
    problems: tuple[str, ...] = ()


def restore(
    job: Job, world: World, held: Held, subject: Subject, scale: LossScale, balancer: Balancer,
    copies: RunCopies | None,
) -> Restored:  # fmt: skip
    """Clear away what was not finished, and give the engine its first numbers. Every rank calls this alike."""
    root = job.folder / CHECKPOINTS
    if world.is_first:
        clean(root)
    # The first rank alone looks, so that all go on from the same one.
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
    """Read a generation, if every rank can. Else what one of them says, and nothing counts of what was read."""
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
