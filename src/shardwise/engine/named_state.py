"""The state of a module by its own names, where ranks have parts of it: whole ones from parts, and parts of whole."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.module_state import joined, values_for
from shardwise.engine.sharded import Sharded
from shardwise.states.data_parallel import DataParallel


class ModuleState:
    """Parameters, buffers and gradients under the names of the original module. All ranks call it alike.

    `parameters` and `buffers` are those of this process's stages; `shapes` are those of the whole, by name;
    `sharded` knows which part of each this rank has; `from_pipeline` gives what each rank of the pipeline gives.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        *,
        data: DataParallel,
        sharded: Sharded,
        shapes: Mapping[str, torch.Size],
        from_pipeline: Callable[[dict[str, Any]], list[dict[str, Any]]],
    ) -> None:
        self._module, self._parameters, self._buffers = module, parameters, buffers
        self._data, self._sharded = data, sharded
        self._shapes, self._from_pipeline = shapes, from_pipeline
        self._in_buckets = {slot.name for bucket in data.buckets for slot in bucket.layout.slots}

    def part(self) -> dict[str, Any]:
        """What this rank has of its stages' parameters, and their buffers."""
        return self._named({name: self._at_home(name, self._local(name)) for name in self._parameters})

    def whole(self) -> dict[str, Any]:
        """All of the module's state."""
        mine = self._named(
            {name: self._at_home(name, self._sharded.gather(name, self._local(name))) for name in self._parameters}
        )
        return joined(self._module, [*self._from_pipeline(mine), mine])

    def gradients(self) -> dict[str, Tensor]:
        """All gradients of the last step as the optimizer was given them."""
        found = {name: self._data.whole_gradient(name) for name in self._parameters if name in self._in_buckets}
        return self.assembled({name: each for name, each in found.items() if each is not None})

    def assembled(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors from what each rank has of those of its stages, each as it has the parameter of that name."""
        mine = {name: self._sharded.gather(name, parts[name]) for name in self._parameters if name in parts}
        return {name: each for part in (*self._from_pipeline(mine), mine) for name, each in part.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take parameters and buffers from a state of the whole module."""
        held = [*self._parameters.values(), *self._buffers.values()]
        values = values_for(self._module, held, state, self._shapes.__getitem__)
        names = self._names_here()
        parts = {names[name]: self._cut(names[name], each) for name, each in values.items() if name in names}
        self._data.load({name: each for name, each in parts.items() if name in self._in_buckets})
        for name, each in parts.items():
            if name not in self._in_buckets:
                (self._buffers[name] if name in self._buffers else self._parameters[name]).copy_(each)

    def numbers(self) -> dict[str, Tensor]:
        """What this process has of its parameters, each where it lives."""
        return {name: self._at_home(name, self._local(name)) for name in self._parameters}

    def _local(self, name: str) -> Tensor:
        if name not in self._in_buckets or self._data.is_always_here(name):
            return self._parameters[name].detach()
        return self._data.wholes.weight(name)

    def _at_home(self, name: str, numbers: Tensor) -> Tensor:
        """What lives on the host is given there."""
        return numbers.cpu() if self._data.wholes.is_offloaded(name) else numbers

    def _named(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Under all names that the module has for them, with the buffers."""
        held = {**parameters, **{name: each.detach() for name, each in self._buffers.items()}}
        return {name: held[own] for name, own in self._names_here().items()}

    def _names_here(self) -> dict[str, str]:
        """The entries of the module's state that are held here; a tied parameter under each of its names."""
        own = {id(each): name for name, each in (*self._parameters.items(), *self._buffers.items())}
        state: dict[str, Any] = self._module.state_dict(keep_vars=True)
        return {name: own[id(each)] for name, each in state.items() if id(each) in own}

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        return whole if name in self._buffers else self._sharded.local(name, whole)
