"""The devices of this run, as the planner knows them."""

import torch

from shardwise import environment
from shardwise.cluster.catalogue import DEVICES, find_device
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.file import find_cluster
from shardwise.cluster.local import local_cluster
from shardwise.errors import ShardwiseError
from shardwise.training.world import World


def cluster_here(num_devices: int) -> Cluster:
    """Return a cluster of `num_devices` GPUs of this machine's kind, or of as many processes if it has no GPU."""
    if not torch.cuda.is_available():
        return local_cluster(num_devices)
    called = torch.cuda.get_device_name(0)
    name = find_device(called)
    if name is None:
        raise ShardwiseError(
            f"nothing is known of the GPU {called!r}, so no plan can be chosen for it",
            remedy=f"--plan dp={num_devices}",
        )
    place = environment.place_under_torchrun()
    per_node = num_devices if place is None else place[1]
    return find_cluster(f"{num_devices // per_node}x{per_node}x{name}")


def peak_share(flops_per_second: float, precision: str, world: World) -> float | None:
    """Return the used share of the devices' peak FLOPs, or None if the catalogue does not have the device."""
    if world.device.type != "cuda":
        return None
    name = find_device(torch.cuda.get_device_name(world.device))
    return None if name is None else flops_per_second / world.size / DEVICES[name].peak(precision)
