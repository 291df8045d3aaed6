"""The devices of this run, as the planner knows them."""

import torch

from shardwise import environment
from shardwise.cluster.catalogue import DEVICES
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.file import find_cluster
from shardwise.cluster.local import local_cluster
from shardwise.errors import ShardwiseError
from shardwise.training.world import World


def cluster_here(num_devices: int) -> Cluster:
    """So many GPUs of this kind of machine, or so many of its processes where it has none."""
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


def find_device(called: str) -> str | None:
    """The catalogue's name for a GPU that calls itself so: `NVIDIA A100-SXM4-80GB` is `a100-80g`."""
    squeezed = "".join(letter for letter in called.lower() if letter.isalnum())
    found = [name for name in DEVICES if name.split("-")[0] in squeezed]
    if not found:
        return None
    # `gh200` has `h200` in it, and of several kinds the one of which most is said.
    longest = max(len(name.split("-")[0]) for name in found)
    found = [name for name in found if len(name.split("-")[0]) == longest]
    return max(found, key=lambda name: (sum(part in squeezed for part in name.split("-")), -len(name)))


def peak_share(flops_per_second: float, precision: str, world: World) -> float | None:
    """The part of the devices' peak in use, on GPUs that the catalogue knows."""
    if world.device.type != "cuda":
        return None
    name = find_device(torch.cuda.get_device_name(world.device))
    return None if name is None else flops_per_second / world.size / DEVICES[name].peak(precision)
