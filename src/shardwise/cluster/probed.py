"""A cluster made from a probe, for the planner to use instead of data sheets."""

from collections import Counter
from dataclasses import replace
from itertools import groupby
from statistics import median

import numpy as np

from shardwise.cluster.catalogue import DEVICES, NODES, find_device
from shardwise.cluster.cluster import Cluster, Pool
from shardwise.cluster.curve import Curve
from shardwise.cluster.device import Device
from shardwise.cluster.kernel import Kernel
from shardwise.cluster.pairs import Pairs, neighbours
from shardwise.cluster.probe import DeviceFigures, Probe
from shardwise.cluster.topology import Fabric, Link, NodeKind

#: The matrix of pairs is kept for at most this many devices. Beyond that, the levels of the pools suffice.
_MOST_PAIRS = 64


def cluster_of(probe: Probe) -> Cluster:
    """Return the cluster. Consecutive hosts with equal devices are a pool. Unmeasured links are the catalogue's."""
    hosts = list(probe.hosts.values())
    pools = []
    for (kind, count), alike in groupby(hosts, key=lambda each: (probe.devices[each[0]].kind, len(each))):
        numbers = [number for host in alike for number in host]
        figures = [probe.devices[number] for number in numbers]
        device = _device(kind, figures)
        node = _node(probe, device, figures, count)
        pools.append(Pool(device=device, num_nodes=len(numbers) // count, node=node))
    kept = probe.pairs if probe.pairs is not None and len(probe.devices) <= _MOST_PAIRS else None
    return Cluster(pools=tuple(pools), pairs=kept)


def _device(kind: str, figures: list[DeviceFigures]) -> Device:
    """Return the median of equal devices. Other figures of a known GPU come from the catalogue."""
    flops = {
        precision: median(each.flops_per_second[precision] for each in figures)
        for precision in figures[0].flops_per_second
    }
    copied = median(each.copied for each in figures)
    memory = min(each.memory_bytes for each in figures)
    known = DEVICES.get(find_device(kind) or "") if figures[0].device.startswith("cuda") else None
    if known is not None:
        eight = flops["fp8"] / known.peak("fp8") if "fp8" in flops else known.fp8_efficiency
        return replace(
            known,
            memory_bytes=memory,
            matmul_efficiency=min(flops["bf16"] / known.peak("bf16"), 1.0),
            fp8_efficiency=min(eight, 1.0),
            memory_efficiency=min(copied / known.memory_bytes_per_second, 1.0),
        )
    is_gpu = figures[0].device.startswith("cuda")
    return Device(
        name=_plain(kind) if is_gpu else "processor",
        memory_bytes=memory,
        flops_per_second=flops,
        memory_bytes_per_second=copied,
        num_units=1,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        architecture="other" if is_gpu else "cpu",
        kernels=() if is_gpu else _kernels([each.kernels for each in figures]) or _usual_kernels(flops["fp32"]),
    )


def _usual_kernels(flops_per_second: float) -> tuple[Kernel, ...]:
    """Return the catalogue's kernels, for a CPU without measured ones, scaled by the speed of its matmuls."""
    usual = DEVICES["cpu"]
    share = flops_per_second / (usual.peak("fp32") * usual.matmul_efficiency)
    return tuple(kernel.taking_turns(share) for kernel in usual.kernels)


def _kernels(measured: list[tuple[Kernel, ...]]) -> tuple[Kernel, ...]:
    """Return the median over the devices, for each kind."""
    found = []
    for alike in zip(*measured, strict=True):
        forward, backward, first, second = (
            median(getattr(each, name) for each in alike)
            for name in ("forward", "backward", "forward_call", "backward_call")
        )
        kind = alike[0].kind
        found.append(Kernel(kind=kind, forward=forward, backward=backward, forward_call=first, backward_call=second))
    return tuple(found)


def _plain(kind: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in kind.lower()).split())


def _node(probe: Probe, device: Device, figures: list[DeviceFigures], count: int) -> NodeKind:
    usual = NODES.get(device.name, NODES["cpu"])
    first = figures[0]
    to_device = median(min(each.to_device, each.to_host) for each in figures)
    disks = [each.disk_read for each in figures if each.disk_read]
    host = replace(
        usual.host,
        memory_bytes=first.host_bytes,
        num_cores=first.num_cores,
        device_bytes_per_second=to_device or device.memory_bytes_per_second / 2,
        disk_bytes_per_second=median(disks) if disks else usual.host.disk_bytes_per_second,
    )
    resized = replace(usual.resized(count), host=host)
    if probe.pairs is None:
        return replace(resized, curves=_of_scope(probe, "inside"))
    domain = _domain(probe.pairs, count)
    near, far = _by_nearness(probe.pairs, domain)
    link = _link(near or far, usual.link)
    return NodeKind(
        devices_per_node=count,
        domain=domain,
        link=link,
        fabric=_fabric(probe, far, link),
        host=host,
        curves=_of_scope(probe, "inside"),
    )


def _domain(pairs: Pairs, count: int) -> int:
    """Return the devices in one domain of fast links: the size of the groups of neighbours if equal, else `count`."""
    sizes = Counter(map(len, neighbours(pairs)))
    return next(iter(sizes)) if len(sizes) == 1 else count


def _by_nearness(pairs: Pairs, domain: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return latency and rate of pairs of neighbours, and of all other pairs."""
    groups = neighbours(pairs)
    if {len(group) for group in groups} != {domain}:
        groups = tuple(tuple(range(start, start + domain)) for start in range(0, pairs.num_devices, domain))
    label = {device: number for number, group in enumerate(groups) for device in group}
    rates, latencies = pairs.rates(), np.array(pairs.latency_seconds)
    near, far = list[tuple[float, float]](), list[tuple[float, float]]()
    for i, j in np.argwhere(~np.eye(pairs.num_devices, dtype=bool)):
        found = (float(latencies[i, j]), float(rates[i, j]))
        (near if label.get(int(i)) == label.get(int(j)) else far).append(found)
    return near, far


def _link(found: list[tuple[float, float]], usual: Link) -> Link:
    if not found:
        return usual  # One device: nothing to send to.
    return Link(
        name="measured",
        latency_seconds=median(latency for latency, _ in found),
        bytes_per_second=median(rate for _, rate in found),
        is_measured=True,
    )


def _fabric(probe: Probe, far: list[tuple[float, float]], link: Link) -> Fabric:
    """Return the network between domains. Its rate is with all devices sending at once, if that was measured."""
    if not far:
        return Fabric(
            name="none", bytes_per_second=link.bytes_per_second, latency_seconds=link.latency_seconds, is_measured=True
        )
    latency, rate = (median(each) for each in zip(*far, strict=True))
    shared = [curve for curve in _of_scope(probe, "rails") if curve.collective == "all-reduce"]
    if shared:
        rate = min(rate, shared[0].fit().bytes_per_second)
    return Fabric(name="measured", bytes_per_second=rate, latency_seconds=latency, is_measured=True)


def _of_scope(probe: Probe, scope: str) -> tuple[Curve, ...]:
    return tuple(curve for curve in probe.curves if curve.scope == scope)
