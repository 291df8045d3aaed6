"""The state of a rank, as parts of whole tensors under the names of the original module.

Parts are views into the engine's own memory. Saving copies out of them and loading copies into them, so neither needs a
gather. Weights are those that the optimizer updates, in its precision.

    entry                                          contents
    layers.0.mlp.up_proj.weight                    a parameter, or a persistent buffer
    optimizer/exp_avg/layers.0.mlp.up_proj.weight  optimizer state for each element of the parameter
    optimizer/step/layers.0.mlp.up_proj.weight     optimizer state for the parameter as a whole
    random/cpu/0                                   the RNG state of rank 0
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
    """A box of an entry, and its elements: a view into the engine's memory."""

    entry: str
    shape: tuple[int, ...]
    box: Box
    numbers: Tensor


def whole_part(entry: str, numbers: Tensor) -> Part:
    """Return a part that is a whole tensor, for tensors that are never split."""
    shape = tuple(numbers.shape)
    return Part(entry, shape, whole_box(shape), numbers)


class Updated(NamedTuple):
    """A weight that an optimizer of this rank updates. `local` is the rank's shape of the parameter. The weight has its
    flattened elements from `start` on. `places` map its indices to those of the whole, which has `shape`."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    start: int
    places: list[Places]
    weight: nn.Parameter
    optimizer: Optimizer

    def parts(self, key: str, numbers: Tensor) -> Iterator[Part]:
        """Yield the parts of an optimizer state with one element for each of the weight's."""
        entry = f"{OPTIMIZER}{key}/{self.name}"
        for box, view in views(numbers, self.local, self.start, self.places):
            yield Part(entry, self.shape, box, view)


class Held:
    """The parts of an engine. `shapes` are the whole shapes of the module's state, from before it was split."""

    def __init__(self, engine: Engine, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._engine, self.shapes = engine, shapes

    def home_of(self, weight: nn.Parameter) -> torch.device:
        """Return the device of a weight's optimizer state."""
        return self._engine.home_of(weight)

    def weights(self) -> Iterator[Part]:
        """Yield the parts of parameters and persistent buffers."""
        engine, data = self._engine, self._engine.states.data
        in_buckets = {slot.name for bucket in data.buckets for slot in bucket.layout.slots}
        for name, shape, start, numbers in data.wholes.pieces():
            yield from self._parts(name, numbers, tuple(shape), start)
        for name, held in engine.parameters.items():
            if name not in in_buckets:
                with without_subclasses():  # The rank's own elements, without a tensor subclass.
                    numbers = held.detach()
                yield from self._parts(name, numbers, tuple(held.shape))
        for name, buffer in engine.buffers.items():
            if name in self.shapes:
                yield from self._parts(name, buffer, tuple(buffer.shape))

    def updated(self) -> Iterator[Updated]:
        """Yield the weights that this rank's optimizers update."""
        data = self._engine.states.data
        for each in data.updates.updated:
            local = tuple(each.weight.shape if each.is_joined else data.wholes.shape_of(each.name))
            places = self._places(each.name, joined=each.is_joined)
            yield Updated(each.name, self.shapes[each.name], local, each.start, places, each.weight, each.optimizer)

    def optimizer_states(self) -> Iterator[Part]:
        """Yield the parts of optimizer state. State of another shape than the weight is whole on each of its ranks."""
        for each in self.updated():
            for key, value in portable_state(each.optimizer, each.weight).items():
                number = value if isinstance(value, Tensor) else torch.tensor(value)
                if number.shape == each.weight.shape and number.dim():
                    yield from each.parts(key, number)
                else:
                    yield whole_part(f"{OPTIMIZER}{key}/{each.name}", number)

    def settle(self) -> None:
        """Complete pending updates and exchanges, before parts are read."""
        self._engine.flush()
        self._engine.states.data.exchange.settle()

    def take_over(self) -> None:
        """Propagate weights that were written to this rank's parts to all copies of them."""
        self._engine.states.data.load({})
        self._engine.states.begin_stream()

    def _parts(self, name: str, numbers: Tensor, local: tuple[int, ...], start: int = 0) -> Iterator[Part]:
        for box, view in views(numbers, local, start, self._places(name)):
            yield Part(name, self.shapes[name], box, view)

    def _places(self, name: str, *, joined: bool = False) -> list[Places]:
        """Return the places of a rank's own tensor in the whole: split over tensor parallel ranks first, then over
        the expert parallel ranks."""
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
    """Return this rank's RNG states."""
    parts = [whole_part(f"{RANDOM}cpu/{world.rank}", torch.get_rng_state())]
    if world.device.type == "cuda":
        parts.append(whole_part(f"{RANDOM}cuda/{world.rank}", torch.cuda.get_rng_state(world.device)))
    return parts


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of a module's state, by the first name of each tensor. Call this before it is split."""
    saved = set(module.state_dict())
    named: Iterable[tuple[str, Tensor]] = (*module.named_parameters(), *module.named_buffers())
    return {name: tuple(each.shape) for name, each in named if name in saved}
