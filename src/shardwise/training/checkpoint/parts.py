"""What a rank holds, as parts of whole tensors under the names of the original module.

Parts are views into the engine's own memory: saving copies out of them, loading copies into them, and nothing has to be
gathered for either. Weights are those that the optimizer updates, in its precision.

    entry                                          of
    layers.0.mlp.up_proj.weight                    a parameter, or a buffer that the module saves
    optimizer/exp_avg/layers.0.mlp.up_proj.weight  what the optimizer remembers of each number of it
    optimizer/step/layers.0.mlp.up_proj.weight     and of all of them together
    random/cpu/0                                   the state of rank 0's random numbers
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.engine import Engine
from shardwise.sharding.tensor.sharding import places as places_of_runs
from shardwise.states.compact_adamw import portable_state
from shardwise.torch_private import without_subclasses
from shardwise.training.checkpoint.boxes import Box, Places, all_places, views, whole_box
from shardwise.training.world import World

OPTIMIZER, RANDOM = "optimizer/", "random/"


class Part(NamedTuple):
    """A box of an entry, and its numbers where the engine has them."""

    entry: str
    shape: tuple[int, ...]
    box: Box
    numbers: Tensor


def whole_part(entry: str, numbers: Tensor) -> Part:
    """A tensor that no rank has but in one piece."""
    shape = tuple(numbers.shape)
    return Part(entry, shape, whole_box(shape), numbers)


class Updated(NamedTuple):
    """A weight that an optimizer of this rank has: `local` is the rank's shape of the parameter, of which the weight is
    the flattened numbers from `start` on, and `places` say where they lie in the whole, of `shape`."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    start: int
    places: list[Places]
    weight: nn.Parameter
    optimizer: Optimizer

    def parts(self, key: str, numbers: Tensor) -> Iterator[Part]:
        """The parts of something that has a number for each of the weight's."""
        entry = f"{OPTIMIZER}{key}/{self.name}"
        for box, view in views(numbers, self.local, self.start, self.places):
            yield Part(entry, self.shape, box, view)


class Held:
    """The parts of an engine. `shapes` are the whole shapes of the module's state, from before it was cut."""

    def __init__(self, engine: Engine, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._engine, self.shapes = engine, shapes

    def home_of(self, weight: nn.Parameter) -> torch.device:
        """Where the state of a weight lives."""
        return self._engine.home_of(weight)

    def weights(self) -> Iterator[Part]:
        """Parameters and saved buffers."""
        engine, data = self._engine, self._engine.states.data
        in_buckets = {slot.name for bucket in data.buckets for slot in bucket.layout.slots}
        for name, shape, start, numbers in data.wholes.pieces():
            yield from self._parts(name, numbers, tuple(shape), start)
        for name, held in engine.parameters.items():
            if name not in in_buckets:
                with without_subclasses():  # A part is what is asked for.
                    numbers = held.detach()
                yield from self._parts(name, numbers, tuple(held.shape))
        for name, buffer in engine.buffers.items():
            if name in self.shapes:
                yield from self._parts(name, buffer, tuple(buffer.shape))

    def updated(self) -> Iterator[Updated]:
        """The weights that optimizers have."""
        data = self._engine.states.data
        for each in data.updates.updated:
            local = tuple(each.weight.shape if each.is_joined else data.wholes.shape_of(each.name))
            places = self._places(each.name, joined=each.is_joined)
            yield Updated(each.name, self.shapes[each.name], local, each.start, places, each.weight, each.optimizer)

    def optimizer_states(self) -> Iterator[Part]:
        """What the optimizers remember. What has no number for each of a weight's is whole wherever the weight is."""
        for each in self.updated():
            for key, value in portable_state(each.optimizer, each.weight).items():
                number = value if isinstance(value, Tensor) else torch.tensor(value)
                if number.shape == each.weight.shape and number.dim():
                    yield from each.parts(key, number)
                else:
                    yield whole_part(f"{OPTIMIZER}{key}/{each.name}", number)

    def settle(self) -> None:
        """Finish what is under way, before parts are read."""
        self._engine.flush()
        self._engine.states.data.exchange.settle()

    def take_over(self) -> None:
        """Weights have been written to: bring them to whoever has copies."""
        self._engine.states.data.load({})
        self._engine.states.begin_stream()

    def _parts(self, name: str, numbers: Tensor, local: tuple[int, ...], start: int = 0) -> Iterator[Part]:
        for box, view in views(numbers, local, start, self._places(name)):
            yield Part(name, self.shapes[name], box, view)

    def _places(self, name: str, *, joined: bool = False) -> list[Places]:
        """Where the indices of a rank's own tensor lie in the whole: cut over tensor parallel ranks first, then over
        the ranks that share experts out."""
        places = all_places(self.shapes[name])
        tensor, experts = self._engine.sharded.tensor, self._engine.sharded.experts
        if tensor is not None and not joined and name in tensor.shards:
            shards = tensor.of(name)
            if shards.dim is not None:
                places[shards.dim] = places_of_runs(shards.runs[tensor.group.rank])
        if experts is not None and not joined and name in experts.parameters:
            mine = experts.layers[experts.parameters[name]].placement.ranks[experts.group.rank]
            places[0] = places[0][np.array(mine, dtype=np.int64)]
        return places


def random_parts(world: World) -> list[Part]:
    """The states of this rank's random numbers."""
    parts = [whole_part(f"{RANDOM}cpu/{world.rank}", torch.get_rng_state())]
    if world.device.type == "cuda":
        parts.append(whole_part(f"{RANDOM}cuda/{world.rank}", torch.cuda.get_rng_state(world.device)))
    return parts


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The whole shapes of what a module saves, by the first name of each. To be asked before it is cut."""
    saved = set(module.state_dict())
    named: Iterable[tuple[str, Tensor]] = (*module.named_parameters(), *module.named_buffers())
    return {name: tuple(each.shape) for name, each in named if name in saved}
