"""Experts that move to other ranks between steps, to where the load that was measured is even.

An engine has weights in buckets, which ZeRO may have cut, and optimizers that have pieces of them. So what belongs to
the experts of a layer is made whole, a layer at a time, and each rank takes what is its own by the new placement.
"""

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.engine.optimizer_state import OptimizerState
from shardwise.engine.parts import States
from shardwise.sharding.expert.load import Loads
from shardwise.sharding.expert.move import better_placements, count_moved
from shardwise.sharding.expert.placement import Placement
from shardwise.sharding.expert.sharding import ExpertSharding
from shardwise.states.data_parallel import DataParallel


def rebalance(experts: ExpertSharding, loads: Loads, gain: float, states: States) -> dict[str, int]:
    """Place experts by the load that was measured; how many moved, by layer."""
    wanted = better_placements(experts, loads.since_placed(), gain)
    moved = count_moved(experts, wanted)
    for layer, placement in wanted.items():
        place_experts(
            layer,
            placement,
            parameters=states.parameters,
            experts=experts,
            data=states.data,
            optimizers=states.optimizers,
        )
    return moved


@torch.no_grad()
def place_experts(
    layer: str,
    placement: Placement,
    *,
    parameters: Mapping[str, nn.Parameter],
    experts: ExpertSharding,
    data: DataParallel,
    optimizers: OptimizerState,
) -> None:
    """Bring the experts of a layer to where a placement has them. Replicas call this alike.

    `parameters` are those of this rank's stages. Of a layer that has none of them the placement is noted alone.
    """
    names = [name for name, owner in experts.parameters.items() if owner == layer and name in parameters]
    weights = {name: experts.gather(name, data.wholes.kept(name)) for name in names}
    states = optimizers.states_of(names) if names else {}
    experts.layers[layer].place(placement)
    mine = {name: experts.local(name, whole) for name, whole in weights.items()}
    in_buckets = {slot.name for bucket in data.buckets for slot in bucket.layout.slots}
    if mine:
        data.load({name: each for name, each in mine.items() if name in in_buckets})
        optimizers.put(states)
    for name in mine.keys() - in_buckets:
        parameters[name].copy_(mine[name])  # It is not trained, and so in no bucket.
