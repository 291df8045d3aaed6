"""The state of a module by its own names, over ranks: assemble whole tensors from parts, and cut parts from whole."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.optimizer_state import OptimizerState
from shardwise.engine.sharded import Sharded
from shardwise.errors import ShardwiseError, unknown
from shardwise.sharding.expert.placement import Placement
from shardwise.states.data_parallel import DataParallel

#: Torch's key for the result of `get_extra_state`.
_EXTRA = "_extra_state"


class ModuleState:
    """Parameters, buffers and gradients under the names of the original module. All ranks call its methods alike.

    `parameters` and `buffers` are those of this process's stages. `shapes` are whole shapes, by name. `sharded` knows
    which part of each this rank has. `from_pipeline` gathers over the ranks of the pipeline.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        buffers: Collection[str],
        *,
        data: DataParallel,
        sharded: Sharded,
        shapes: Mapping[str, torch.Size],
        from_pipeline: Callable[[dict[str, Any]], list[dict[str, Any]]],
    ) -> None:
        self._module, self._parameters, self._buffers = module, parameters, buffers
        self._known = {name for name, _ in module.named_buffers()}
        self._data, self._sharded = data, sharded
        self._shapes, self._from_pipeline = shapes, from_pipeline
        self._in_buckets = {slot.name for bucket in data.buckets for slot in bucket.layout.slots}

    def part(self) -> dict[str, Any]:
        """Return this rank's parts of its stages' parameters, and their buffers."""
        return self._named(self.numbers(), {name: each.detach() for name, each in self._buffers_now().items()})

    def whole(self) -> dict[str, Any]:
        """Return the whole state of the module."""
        every = self._module.state_dict(keep_vars=True)
        buffers = {name: each.detach().clone() for name, each in self._buffers_now().items()}
        mine = self._named({name: self._at_home(name, self._copy(name)) for name in self._parameters}, buffers)
        mine |= self._late(every)
        found = {name: each for part in (*self._from_pipeline(mine), mine) for name, each in part.items()}
        strangers = [name for name in every if name not in found]
        if strangers:
            raise ShardwiseError(
                f"{strangers[0]} is in the module's state_dict(), put there by a hook, and is neither a parameter nor a"
                " buffer of it: ranks have parts of the module, and the hook would be given these",
                remedy="no such hook while the engine is there; what it makes, of engine.state_dict()",
            )
        # Another stage may have made some, which this process's module has not.
        known = self._known | self._shapes.keys() | every.keys()
        return {name: found[name] for name in every} | {n: each for n, each in found.items() if n not in known}

    def gradients(self) -> dict[str, Tensor]:
        """Return all gradients of the last step, as the optimizer received them."""
        found = {name: self._data.whole_gradient(name) for name in self._parameters if name in self._in_buckets}
        return self.assembled({name: each for name, each in found.items() if each is not None})

    def assembled(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Assemble whole tensors from the parts of all ranks, each sharded like the parameter of that name."""
        mine = {name: self._sharded.gather(name, parts[name]) for name in self._parameters if name in parts}
        return {name: each for part in (*self._from_pipeline(mine), mine) for name, each in part.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load parameters and buffers from a state of the whole module. A state that does not fit changes nothing."""
        self._put({name: self._cut(name, each) for name, each in self._values_for(state).items()})
        for name in state:
            if name.endswith(_EXTRA):
                self._module.get_submodule(name.removesuffix(_EXTRA).removesuffix(".")).set_extra_state(state[name])

    @torch.no_grad()
    def _put(self, parts: Mapping[str, Tensor]) -> None:
        self._data.load({name: each for name, each in parts.items() if name in self._in_buckets})
        for name in parts.keys() - self._in_buckets:  # A buffer, or a frozen parameter.
            (self._module.get_buffer(name) if name in self._buffers else self._parameters[name]).copy_(parts[name])

    def _values_for(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of tensors held here; one name of a tied parameter is enough.

        Refuse a state that lacks some, has others than the module, or has a wrong shape.
        """
        every = self._module.state_dict(keep_vars=True)
        for name in state:
            if name not in every:
                raise unknown("entry of a state", name, every)
        mine = self._names_here()
        given = {mine[name]: state[name] for name in reversed(mine) if name in state}
        missing = [name for name in mine if mine[name] not in given]
        if missing:
            raise ShardwiseError(
                f"the state lacks {missing[0]}, one of {len(missing)} missing of the {len(mine)} entries that are held"
                " here",
                remedy="engine.state_dict() of all ranks, or state_dict(sharded=True) of this one under the same plan",
            )
        for name, own in mine.items():
            value = given[own]
            if isinstance(value, Tensor) and value.shape != self._shapes[name]:
                raise ShardwiseError(
                    f"{name} has shape {tuple(value.shape)} in the state and {tuple(self._shapes[name])} in the module",
                    remedy="the state of a module with the same shapes",
                )
        return given

    @torch.no_grad()
    def place_experts(self, wanted: Mapping[str, Placement], optimizers: OptimizerState) -> None:
        """Move the experts of layers to the ranks of their new placements. Replicas call this alike."""
        for layer, placement in wanted.items():
            self._place(layer, placement, optimizers)

    def _place(self, layer: str, placement: Placement, optimizers: OptimizerState) -> None:
        """Move the experts of a layer to the ranks of a new placement. Replicas call this alike.

        Weights are in buckets, which ZeRO may have cut, and optimizers have pieces of them. So the state of the experts
        is made whole, and each rank takes its own by the new placement. If this process has none of the layer, only the
        placement is recorded.
        """
        experts = self._sharded.experts
        assert experts is not None, "there are experts"
        names = [name for name, owner in experts.parameters.items() if owner == layer and name in self._parameters]
        weights = {name: experts.gather(name, self._data.wholes.kept(name)) for name in names}
        states = optimizers.states_of(names) if names else {}
        experts.layers[layer].place(placement)
        if names:
            self._put({name: experts.local(name, whole) for name, whole in weights.items()})
            optimizers.put(states)

    def numbers(self) -> dict[str, Tensor]:
        """Return this process's values of its parameters, each where it lives."""
        return {name: self._at_home(name, self._local(name)) for name in self._parameters}

    def _local(self, name: str) -> Tensor:
        if self._is_in_place(name):
            return self._parameters[name].detach()
        return self._data.wholes.weight(name)

    def _copy(self, name: str) -> Tensor:
        """Return a whole parameter in memory that no step writes to. It is current, also for parameters of other
        stages."""
        local = self._local(name)
        whole = self._sharded.gather(name, local)
        return whole.clone() if whole is local and self._is_in_place(name) else whole

    def _is_in_place(self, name: str) -> bool:
        return name not in self._in_buckets or self._data.is_always_here(name)

    def _at_home(self, name: str, numbers: Tensor) -> Tensor:
        """Return values on the device where they live: the host, if they are offloaded."""
        return numbers.cpu() if self._data.wholes.is_offloaded(name) else numbers

    def _named(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return tensors under all of the module's names for them."""
        held = {**parameters, **buffers}
        return {**{name: held[own] for name, own in self._names_here().items()}, **self._extra_states()}

    def _extra_states(self) -> dict[str, Any]:
        """Return what modules save besides tensors (`get_extra_state`), of modules with state here or on no rank."""
        found = {}
        for name, each in self._module.state_dict(keep_vars=True).items():
            if name.endswith(_EXTRA):
                owner = name.removesuffix(_EXTRA)
                if not any(other.startswith(owner) for other in self._shapes.keys() - self._parameters.keys()):
                    found[name] = each
        return found

    def _names_here(self) -> dict[str, str]:
        """Return the entries of the module's state that are held here; a tied parameter under each of its names."""
        own = {id(each): name for name, each in (*self._parameters.items(), *self._buffers_now().items())}
        state: dict[str, Any] = self._module.state_dict(keep_vars=True)
        return {name: own[id(each)] for name, each in state.items() if id(each) in own}

    def _buffers_now(self) -> dict[str, Tensor]:
        """Return the current buffers: a user may have replaced them."""
        return {name: self._module.get_buffer(name) for name in self._buffers}

    def _late(self, every: Collection[str]) -> dict[str, Tensor]:
        """Return the buffers that forwards have made since, where there was none or it was None, if they are saved."""
        made = dict(self._module.named_buffers())
        return {n: each.detach().clone() for n, each in made.items() if n not in self._known and n in every}

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        return whole if name in self._buffers else self._sharded.local(name, whole)


class NotCopied:
    """What is neither copied nor pickled: not by `copy.deepcopy`, nor by `torch.save`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardwiseError(
            "an engine cannot be copied or pickled: it is connected to the other ranks, and holds this rank's part of"
            " the weights",
            remedy="engine.state_dict() and engine.optimizer_state_dict() on every rank, which return copies of all of"
            " them: torch.save these on one rank, or module.load_state_dict(engine.state_dict()) into another module",
        )
