"""First numbers for an engine: those of the newest checkpoint, or of the recipe's subject."""

from pathlib import Path

import torch

from shardwise.training.balance import Balancer
from shardwise.training.checkpoint.index import clean, find_last
from shardwise.training.checkpoint.parts import Held
from shardwise.training.checkpoint.read import Reader, load, load_random
from shardwise.training.precision import LossScale
from shardwise.training.subject import Subject
from shardwise.training.world import World


def fill(
    root: Path, world: World, held: Held, subject: Subject, scale: LossScale, balancer: Balancer, *, seed: int
) -> int:
    """Clear away what was not finished, and give the engine its numbers; returns how many steps they have had."""
    if world.is_first:
        clean(root)
    # The first rank alone looks, so that all go on from the same one.
    last = world.first(find_last(root))
    if last is not None:
        with Reader(last) as reader:
            balancer.take(reader.index.extra)
            load(reader, held)
            load_random(reader, world)
            scale.take(reader.index.extra)
            return reader.index.step
    subject.fill(held)
    torch.manual_seed(seed * 1000 + world.rank)
    return 0
