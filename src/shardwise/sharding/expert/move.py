"""Move experts to other ranks between steps, with their weights, gradients and optimizer state.

An expert is one row of every tensor of its layer's parameters. Its output and its training do not depend on its rank,
so the loss does not change. Tensors are written in place, since other objects may hold references to them.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError, unknown
from shardwise.ranks.collectives import Group, start_all_to_all
from shardwise.sharding.expert.load import Load
from shardwise.sharding.expert.placement import Placement, balanced
from shardwise.sharding.expert.sharding import ExpertSharding


def rebalance(
    sharding: ExpertSharding,
    module: nn.Module,
    *,
    optimizers: Sequence[Optimizer] = (),
    also: Mapping[str, Sequence[Tensor]] | None = None,
    gain: float = 0.05,
) -> dict[str, int]:
    """Place experts by the load measured since the last call; return how many moved in each layer.

    A layer changes only if its peak load of a rank falls by more than the share `gain`. All ranks call this together.
    """
    device = next((each.device for each in module.parameters() if not each.is_meta), torch.device("cpu"))
    wanted = better_placements(sharding, sharding.measured_load(device), gain)
    moved = count_moved(sharding, wanted)
    move(sharding, module, wanted, optimizers=optimizers, also=also)
    return moved


def better_placements(sharding: ExpertSharding, loads: Load, gain: float) -> dict[str, Placement]:
    """Return, for each layer where the peak load falls by more than `gain`, a placement for the measured load."""
    wanted = {}
    for name, dispatch in sharding.layers.items():
        home, load = dispatch.placement, loads[name]
        placement = balanced(home, load)
        if placement.peak(load) < (1 - gain) * home.peak(load):
            wanted[name] = placement
    return wanted


def count_moved(sharding: ExpertSharding, placements: Mapping[str, Placement]) -> dict[str, int]:
    """Count the slots of each layer that would hold another expert."""
    return {
        name: sum(one != other for one, other in zip(sharding.layers[name].placement.order, each.order, strict=True))
        for name, each in placements.items()
    }


@torch.no_grad()
def move(
    sharding: ExpertSharding,
    module: nn.Module,
    placements: Mapping[str, Placement],
    *,
    optimizers: Sequence[Optimizer] = (),
    also: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Move experts to new placements, given by layer. All ranks must call this together, between steps.

    Optimizer state moves with them if it has an entry for each expert. So do the tensors that `also` lists for a
    parameter: master weights, for example.
    """
    for layer, placement in placements.items():
        if layer not in sharding.layers:
            raise unknown("layer of experts", layer, sharding.layers)
        dispatch = sharding.layers[layer]
        if placement.sizes != dispatch.placement.sizes:
            raise ShardwiseError(
                f"{layer} has {dispatch.placement.sizes} experts on its ranks, and would have {placement.sizes}:"
                " parameters cannot change their shapes",
                remedy="a placement with as many experts on each rank",
            )
        for name in [name for name, owner in sharding.parameters.items() if owner == layer]:
            parameter = module.get_parameter(name)
            for tensor in [*_tensors_of(parameter, optimizers), *(also or {}).get(name, ())]:
                _bring(tensor, sharding.group, dispatch.placement, placement)
        dispatch.place(placement)


def _tensors_of(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    """Yield a parameter, its gradient, and the optimizer states that have an entry for each of its experts."""
    yield parameter
    if parameter.grad is not None:
        yield parameter.grad
    for optimizer in optimizers:
        if getattr(optimizer, "keeps_blocks", False):
            raise ShardwiseError(
                f"{type(optimizer).__name__} keeps 8 bits a number and a scale for blocks that several experts share:"
                " experts cannot take theirs along",
                remedy="optimizer.states=bf16, or balance.place_every=0",
            )
        for _, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor) and value.dim() and len(value) == len(parameter):
                yield value


def _bring(tensor: Tensor, group: Group, old: Placement, new: Placement) -> None:
    """Exchange the rows of a tensor, one for each expert on this rank. Experts that stay may change rows."""
    rank = group.rank
    leaving = [[old.ranks[rank].index(e) for e in new.ranks[other] if e in old.ranks[rank]]
               for other in range(group.size)]  # fmt: skip
    coming = [[new.ranks[rank].index(e) for e in new.ranks[rank] if e in old.ranks[other]]
              for other in range(group.size)]  # fmt: skip
    rows = tensor.index_select(0, _index(leaving, tensor))
    arrived = start_all_to_all(rows, group, list(map(len, leaving)), list(map(len, coming))).finish()
    tensor.index_copy_(0, _index(coming, tensor), arrived)


def _index(slots: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    return torch.tensor([slot for some in slots for slot in some], dtype=torch.int64, device=like.device)
