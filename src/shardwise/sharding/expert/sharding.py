"""What became of a module's experts: by the names of their parameters, where each lies."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwise.ranks.collectives import Group, start_all_gather, start_all_reduce
from shardwise.sharding.expert.dispatch import Dispatch
from shardwise.stages.split.materialise import materialise, replace


class CutBefore(Protocol):
    """How a module was cut before its experts are: `sharding.tensor.sharding.Sharding` is one of these."""

    @property
    def twin(self) -> nn.Module:
        """The whole module, without numbers."""
        ...

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        ...


@dataclass(kw_only=True)
class ExpertSharding:
    """How the experts of a module lie on the ranks of an expert parallel group.

    `layers` are the experts by their names in the module, and `parameters` says of each of their parameters whose it
    is. `whole` says of what looks like experts and is whole on every rank why that is so.
    """

    #: The ranks that share the experts out.
    group: Group
    #: The ranks that hold the same experts, and those that hold the same dense weights: gradients are summed over them.
    same: Group
    replicas: Group
    layers: Mapping[str, Dispatch]
    parameters: Mapping[str, str]
    whole: Mapping[str, str] = field(default_factory=dict)
    #: Whether tensor parallel ranks have different experts. Else they have the same, whole or cut inside.
    over_tensor: bool = False
    #: The module as it was, without numbers.
    twin: nn.Module = field(default_factory=nn.Module, repr=False)

    def gradients(self, name: str) -> Group:
        """The ranks over which a parameter's gradient is summed. The first of them counts it in a norm."""
        return self.same if name in self.parameters else self.replicas

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's experts of a whole parameter, or of anything that has one entry for each expert."""
        if name not in self.parameters:
            return whole
        mine = self._dispatch(name).placement.ranks[self.group.rank]
        return whole.index_select(0, torch.tensor(mine, device=whole.device))

    def gather(self, name: str, local: Tensor) -> Tensor:
        """The whole of a parameter, its gradient or its optimizer state, from every rank's experts. All call alike."""
        if name not in self.parameters or self.group.size == 1:
            return local
        placement = self._dispatch(name).placement
        longest = max(placement.sizes)
        filled = local.new_zeros((longest, *local.shape[1:]))
        filled[: len(local)] = local
        pieces = start_all_gather(filled, self.group).finish().view(self.group.size, *filled.shape)
        by_slot = torch.cat([piece[:size] for piece, size in zip(pieces, placement.sizes, strict=True)])
        return torch.empty_like(by_slot).index_copy_(0, torch.tensor(placement.order, device=local.device), by_slot)

    def slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """This rank's part of a whole, one slice a dim, for what reads or draws parts. As placed at first."""
        if name not in self.parameters:
            return tuple(slice(0, size) for size in shape)
        mine = self._dispatch(name).placement.ranks[self.group.rank]
        assert mine == tuple(range(mine[0], mine[-1] + 1)), f"experts {mine} do not lie next to each other"
        return slice(mine[0], mine[-1] + 1), *(slice(0, size) for size in shape[1:])

    def measured_load(self, device: torch.device | str = "cpu") -> dict[str, list[int]]:
        """How many rows each expert of each layer has had in training since the last call, on all ranks together.

        Every rank calls this alike; the numbers begin at 0 again.
        """
        if not self.layers:
            return {}
        counts = [dispatch.take_load() for dispatch in self.layers.values()]
        summed = torch.cat(counts).to(device)
        for group in (self.group, self.same):
            summed = start_all_reduce(summed, group).finish()
        summed = summed.cpu()
        parts = torch.split(summed, [len(each) for each in counts])
        return {name: part.tolist() for name, part in zip(self.layers, parts, strict=True)}

    def materialise(
        self, module: nn.Module, names: Collection[str] | None = None, *, seed: int = 0,
        device: torch.device | str = "cpu", tensor: CutBefore | None = None,
    ) -> None:  # fmt: skip
        """Give experts that are on the meta device their part of what the whole module would have drawn.

        `tensor` is how the module was cut before, if it was. One whole parameter is there at a time.
        """
        twin = self.twin if tensor is None else tensor.twin
        for name, parameter in list(module.named_parameters()):
            if parameter.is_meta and name in self.parameters and (names is None or name in names):
                materialise(twin, [name], seed=seed, device=device)
                drawn = twin.get_parameter(name)
                whole = drawn.detach() if tensor is None else tensor.local(name, drawn.detach())
                replace(module, parameter, self.local(name, whole))
                replace(twin, drawn, drawn.detach().to("meta"))

    def describe(self) -> str:
        """What is shared out, and what stays whole and why, in lines for people."""
        lines = [f"{name}: {dispatch.placement.sizes} of {len(dispatch.placement.order)} experts on each rank"
                 for name, dispatch in self.layers.items()]  # fmt: skip
        return "\n".join([*lines, *(f"{name}: whole on every rank, since {why}" for name, why in self.whole.items())])

    def _dispatch(self, name: str) -> Dispatch:
        return self.layers[self.parameters[name]]
