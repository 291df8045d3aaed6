"""What became of a module's experts: by the names of their parameters, where each lies."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwise.ranks.collectives import Group, filled, start_all_gather, start_all_reduce
from shardwise.sharding.expert.dispatch import Dispatch
from shardwise.stages.split.materialise import materialise, replace


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
        mine = self.layers[self.parameters[name]].placement.ranks[self.group.rank]
        return whole.index_select(0, torch.tensor(mine, device=whole.device))

    def gather(self, name: str, local: Tensor) -> Tensor:
        """The whole of a parameter, its gradient or its optimizer state, from every rank's experts. All call alike."""
        if name not in self.parameters or self.group.size == 1:
            return local
        placement = self.layers[self.parameters[name]].placement
        piece = filled(local, 0, max(placement.sizes))
        pieces = start_all_gather(piece, self.group).finish().view(self.group.size, *piece.shape)
        by_slot = torch.cat([piece[:size] for piece, size in zip(pieces, placement.sizes, strict=True)])
        return torch.empty_like(by_slot).index_copy_(0, torch.tensor(placement.order, device=local.device), by_slot)

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

    @torch.no_grad()
    def draw(self, module: nn.Module, names: Collection[str], *, seed: int, device: torch.device) -> None:
        """Give experts, by name, their part of what the whole module would have drawn; one whole is there at a time.

        Drawn by themselves, the experts of all ranks would be the same: their names are.
        """
        for name, parameter in module.named_parameters():
            if name in names and name in self.parameters and not parameter.is_meta:
                materialise(self.twin, [name], seed=seed, device=device)
                drawn = self.twin.get_parameter(name)
                parameter.copy_(self.local(name, drawn.detach()))
                replace(self.twin, drawn, drawn.detach().to("meta"))

    def describe(self) -> str:
        """What is shared out, and what stays whole and why, in lines for people."""
        lines = [f"{name}: {dispatch.placement.sizes} of {len(dispatch.placement.order)} experts on each rank"
                 for name, dispatch in self.layers.items()]  # fmt: skip
        return "\n".join([*lines, *(f"{name}: whole on every rank, since {why}" for name, why in self.whole.items())])
