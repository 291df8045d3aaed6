"""This machine as a cluster for the planner, from the measurements of a profile.

For a GPU of the catalogue, measured values replace those of the catalogue. A CPU has no catalogue entry: its matmuls
and copies are timed and given as a probe. `shardwise probe` measures more.
"""

from dataclasses import replace
from pathlib import Path

import torch

from shardwise import environment
from shardwise.cluster.catalogue import DEVICES, NODES, find_device
from shardwise.cluster.cluster import Cluster, Pool
from shardwise.cluster.device import Device
from shardwise.cluster.file import to_toml
from shardwise.cluster.local import memory_bytes
from shardwise.cluster.pairs import Pairs
from shardwise.cluster.probe import DeviceFigures, Probe
from shardwise.cluster.probed import cluster_of
from shardwise.cluster.topology import NodeKind
from shardwise.errors import ShardwiseError
from shardwise.output import save_output
from shardwise.placing.places import copied_bytes_per_second, matmul_flops
from shardwise.training.profile import Measured


def calibrate(measured: Measured, path: Path) -> None:
    """Write `cluster.toml`."""
    save_output(path, to_toml(_cluster_of(measured)), remedy="--calibrate cluster.toml")


def _cluster_of(measured: Measured) -> Cluster:
    """Return the devices of a profile as one node. For CPUs it is made from a probe with few measurements."""
    if measured.device != "cuda":
        return cluster_of(_as_probe(measured))
    device = _known_gpu()
    node = NODES[device.name]
    link = node.link
    if measured.link is not None:
        latency, rate = measured.link
        link = replace(link, name="measured", latency_seconds=latency, bytes_per_second=rate)
    count = measured.num_ranks
    kind = NodeKind(devices_per_node=count, domain=count, link=link, fabric=node.fabric, host=node.host)
    return Cluster(pools=(Pool(device=device, num_nodes=1, node=kind),))


def _as_probe(measured: Measured) -> Probe:
    """Return a profile as a probe. Each process has one thread, and the link of the first two stands for all."""
    count, host = measured.num_ranks, environment.node_name()
    names = tuple(f"cpu:{number}" for number in range(count))
    rate = matmul_flops(torch.device("cpu"), torch.float32, size=512)
    one = DeviceFigures(
        host=host,
        device=names[0],
        kind=environment.processor_name(),
        memory_bytes=memory_bytes() // environment.num_cores(),
        flops_per_second={"fp32": rate},
        copied=copied_bytes_per_second(),
        num_cores=environment.num_cores(),
        host_bytes=memory_bytes(),
    )
    pairs = None
    if measured.link is not None:
        latency, speed = (_to_all_others(each, count) for each in measured.link)
        pairs = Pairs(hosts=(host,) * count, devices=names, bytes_per_second=speed, latency_seconds=latency)
    return Probe(backend="gloo", devices=tuple(replace(one, device=name) for name in names), pairs=pairs)


def _to_all_others(value: float, count: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(value * (i != j) for j in range(count)) for i in range(count))


def _known_gpu() -> Device:
    called = torch.cuda.get_device_name()
    name = find_device(called)
    if name is None:
        raise ShardwiseError(f"the catalogue has no GPU {called}", remedy="a cluster.toml that describes it")
    known = DEVICES[name]
    rate = matmul_flops(torch.device("cuda"), torch.bfloat16, size=8192)
    return replace(known, matmul_efficiency=min(rate / known.peak("bf16"), 1.0))
