"""Experts of a mesh engine that move to other ranks between steps, to where the load that was measured is even.

An engine has weights in buckets, which ZeRO may have cut, and optimizers that have pieces of them. So what belongs to
the experts of a layer is made whole, a layer at a time, and each rank takes what is its own by the new placement.
"""

import torch

from shardwise.runtime.data.parallel import DataParallel
from shardwise.runtime.expert.placement import Placement
from shardwise.runtime.expert.sharding import ExpertSharding
from shardwise.runtime.mesh_optimizers import MeshOptimizers


@torch.no_grad()
def place_experts(
    layer: str, placement: Placement, *, experts: ExpertSharding, data: DataParallel, optimizers: MeshOptimizers
) -> None:
    """Bring the experts of a layer of this rank's stages to where a placement has them. Replicas call this alike."""
    names = [name for name, owner in experts.parameters.items() if owner == layer]
    weights = {name: experts.gather(name, data.whole(name)) for name in names}
    states = optimizers.states_of(names)
    experts.layers[layer].place(placement)
    data.load({name: experts.local(name, whole) for name, whole in weights.items()})
    optimizers.put(states)
