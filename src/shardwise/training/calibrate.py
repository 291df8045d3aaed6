"""This machine as a cluster, from what a profile has measured: prices that the planner takes.

Of a GPU that the catalogue knows, everything stays as it is there but what was measured. A processor has no data sheet
here: its matmuls and copies are timed.
"""

import timeit
from dataclasses import replace
from pathlib import Path

import torch

from shardwise import environment
from shardwise.cluster.catalogue import DEVICES, NODES, find_device
from shardwise.cluster.cluster import Cluster, Pool
from shardwise.cluster.device import Device
from shardwise.cluster.file import to_toml
from shardwise.cluster.local import memory_bytes
from shardwise.cluster.topology import Fabric, Host, Link, NodeKind
from shardwise.errors import ShardwiseError
from shardwise.output import save_output
from shardwise.placing.places import copied_bytes_per_second, matmul_flops
from shardwise.training.profile import Measured


def calibrate(measured: Measured, path: Path) -> None:
    """Write `cluster.toml`."""
    save_output(path, to_toml(_cluster_of(measured)), remedy="--calibrate cluster.toml")


def _cluster_of(measured: Measured) -> Cluster:
    """The devices of a profile as one node."""
    device = _known_gpu() if measured.device == "cuda" else _processor()
    node = NODES.get(device.name)
    link = node.link if node else _own_link(device)
    if measured.link is not None:
        latency, rate = measured.link
        link = replace(link, name="measured", latency_seconds=latency, bytes_per_second=rate)
    speed = device.memory_bytes_per_second
    host = Host(memory_bytes=memory_bytes(), device_bytes_per_second=speed, num_cores=environment.num_cores())
    # There is one machine: nothing goes further than its link.
    fabric = Fabric(name="none", bytes_per_second=link.bytes_per_second, latency_seconds=link.latency_seconds)
    kind = NodeKind(
        devices_per_node=measured.num_ranks,
        domain=measured.num_ranks,
        link=link,
        fabric=node.fabric if node else fabric,
        host=node.host if node else host,
    )
    return Cluster(pools=(Pool(device=device, num_nodes=1, node=kind),))


def _known_gpu() -> Device:
    called = torch.cuda.get_device_name()
    name = find_device(called)
    if name is None:
        raise ShardwiseError(f"the catalogue knows no GPU {called}", remedy="a cluster.toml written by hand")
    known = DEVICES[name]
    rate = matmul_flops(torch.device("cuda"), torch.bfloat16, size=8192)
    return replace(known, matmul_efficiency=min(rate / known.peak("bf16"), 1.0))


def _processor() -> Device:
    """One process of this machine, with one thread."""
    rate = matmul_flops(torch.device("cpu"), torch.float32, size=512)
    return Device(
        name="processor",
        memory_bytes=memory_bytes() // environment.num_cores(),
        flops_per_second={"fp32": rate},
        memory_bytes_per_second=copied_bytes_per_second(),
        num_units=1,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
    )


def _own_link(device: Device) -> Link:
    """One process alone sends to itself."""
    seconds = min(timeit.repeat(torch.zeros(2).clone, number=1))
    return Link(name="memory", bytes_per_second=device.memory_bytes_per_second / 2, latency_seconds=seconds)
