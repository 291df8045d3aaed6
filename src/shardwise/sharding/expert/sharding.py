"""The result of sharding a module's experts: the location of each, by the names of their parameters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwise.ranks.collectives import Group, filled, start_all_gather, start_all_reduce
from shardwise.sharding.expert.dispatch import Dispatch
from shardwise.stages.split.materialise import materialise, replace


@dataclass(kw_only=True)
class ExpertSharding:
    """How a module's experts are placed on the ranks of an expert parallel group.

    `layers` holds the dispatch of each expert layer by name. `parameters` maps each of their parameters to its layer.
    `whole` maps modules that look like experts but stay whole on every rank to the reason.
    """

    #: The ranks over which experts are sharded.
    group: Group
    #: The ranks that hold the same experts, and those that hold the same dense weights: gradients are summed over them.
    same: Group
    replicas: Group
    layers: Mapping[str, Dispatch]
    parameters: Mapping[str, str]
    whole: Mapping[str, str] = field(default_factory=dict)
    #: Whether tensor parallel ranks have different experts. If not, they have the same ones, whole or cut inside.
    over_tensor: bool = False
    #: The original module on the meta device.
    twin: nn.Module = field(default_factory=nn.Module, repr=False)

    def gradients(self, name: str) -> Group:
        """Return the ranks over which a parameter's gradient is summed. The first of them counts it in a norm."""
        return self.same if name in self.parameters else self.replicas

    def local(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's experts of a whole parameter, or of any tensor with one entry for each expert."""
        if name not in self.parameters:
            return whole
        mine = self.layers[self.parameters[name]].placement.ranks[self.group.rank]
        return whole.index_select(0, torch.tensor(mine, device=whole.device))

    def gather(self, name: str, local: Tensor) -> Tensor:
        """Gather a whole parameter, gradient or optimizer state from all ranks, which must call this together."""
        if name not in self.parameters or self.group.size == 1:
            return local
        placement = self.layers[self.parameters[name]].placement
        piece = filled(local, 0, max(placement.sizes))
        pieces = start_all_gather(piece, self.group).finish().view(self.group.size, *piece.shape)
        by_slot = torch.cat([piece[:size] for piece, size in zip(pieces, placement.sizes, strict=True)])
        return torch.empty_like(by_slot).index_copy_(0, torch.tensor(placement.order, device=local.device), by_slot)

    def measured_load(self, device: torch.device | str = "cpu") -> dict[str, list[int]]:
        """Return the rows of each expert of each layer in training since the last call, summed over all ranks.

        All ranks must call this together. It resets the counts.
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

    @torch.no_grad()
    def draw(self, module: nn.Module, names: Collection[str], *, seed: int, device: torch.device) -> None:
        """Initialise named expert parameters with their part of the whole module's; only one is held whole at a time.

        Drawn separately, the experts of all ranks would be equal, because their names are.
        """
        for name, parameter in module.named_parameters():
            if name in names and name in self.parameters and not parameter.is_meta:
                materialise(self.twin, [name], seed=seed, device=device)
                drawn = self.twin.get_parameter(name)
                parameter.copy_(self.local(name, drawn.detach()))
                replace(self.twin, drawn, drawn.detach().to("meta"))

    def describe(self) -> str:
        """Describe which experts are sharded, and which stay whole and why, in readable lines."""
        lines = [f"{name}: {dispatch.placement.sizes} of {len(dispatch.placement.order)} experts on each rank"
                 for name, dispatch in self.layers.items()]  # fmt: skip
        return "\n".join([*lines, *(f"{name}: whole on every rank, since {why}" for name, why in self.whole.items())])
