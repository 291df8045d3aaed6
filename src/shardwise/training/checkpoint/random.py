"""Random numbers in a checkpoint: each rank's states go on where they were."""

from typing import Any

import torch

from shardwise.training.checkpoint.boxes import whole_box
from shardwise.training.checkpoint.parts import Part
from shardwise.training.checkpoint.read import Reader
from shardwise.training.world import World

_RANDOM = "random"


def random_parts(world: World) -> list[Part]:
    """The states of this rank's random numbers, as parts of a checkpoint."""
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return [
        Part(f"{_RANDOM}/{kind}/{world.rank}", tuple(state.shape), whole_box(state.shape), state)
        for kind, state in states.items()
    ]


def load_random(reader: Reader, world: World) -> None:
    """Random numbers go on as they were. A rank that was not there before has its own, from the step."""
    setters: dict[str, Any] = {"cpu": torch.set_rng_state}
    if world.device.type == "cuda":
        setters["cuda"] = lambda state: torch.cuda.set_rng_state(state, world.device)
    torch.manual_seed(reader.index.step * 1000 + world.rank)
    for kind, set_state in setters.items():
        entry = f"{_RANDOM}/{kind}/{world.rank}"
        if entry in reader.index.entries:
            set_state(reader.whole(entry).clone())
