"""Seconds of collectives and of point-to-point messages (hops) on a topology.

A group is placed before it is priced: how many of its ranks share a domain of fast links (`inside`), and how many
domains it spans (`domains`). Tensor parallelism is the innermost axis, then context, data and pipeline, as in
Megatron-LM and DeepSpeed, so a group is described by its size and its stride.

    t = latency(steps) + factor x bytes / bus bandwidth        nccl-tests' factors: facts 2.1

Inside a domain, measured curves are used if there are any: those of a probe, or those of the link
(`cluster/measured.py`). Across domains, all groups of the cluster communicate at the same time, so each rank has only
its own share of its node's NICs: a ring with `inside` ranks in a domain leaves the domain over `inside` shares.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from shardwise.cluster.cluster import Pool
from shardwise.cluster.curve import Curve, bus_factor
from shardwise.cluster.measured import CURVES, RING_SHARE
from shardwise.cluster.topology import Link
from shardwise.cost.numbers import Floats, Number, ceil_divide

# Latencies in NCCL's own tuner, simple protocol (facts 2.2, src/graph/tuning.cc): of a call, and of a step inside a
# node, for rings and for trees. The tuner doubles a step over the network for this protocol: `_step_across`.
_CALL = 8.4e-6
_STEP_INSIDE = 3.4e-6
_TREE_STEP_INSIDE = 4.0e-6
# Share of a link's rate that large messages reach, for links without a measured curve: A100 .78 (235 of 300), facts
# 2.4. PCIe: .7 (SimuMax, A100 PCIe all-reduce .69 to .70).
_REACHED = 0.78
# The same for a NIC: 97 % (EFA, facts 2.4), 382 of 400 GB/s for four nodes of B200.
_NIC_REACHED = 0.95
# The same between two devices of one domain: A100 .91, H100 .83, GB200 .83 (facts 2.4).
_HOP_REACHED = 0.85


class Group(NamedTuple):
    """Ranks that communicate: their number, how many of them are in one domain, and the number of domains."""

    size: Floats
    inside: Floats
    domains: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """The links of one pool, which price collectives."""

    pool: Pool
    nic_efficiency: float = _NIC_REACHED

    def group(self, size: Number, stride: Number) -> Group:
        """Place a group of `size` ranks that are `stride` apart."""
        return self.nested(size, stride, 1, np.inf)

    def nested(self, near: Number, stride: Number, far: Number, far_stride: Number) -> Group:
        """Place `far` runs of `near` ranks. Ranks of a run are `stride` apart, and runs are `far_stride` apart."""
        count, runs = np.asarray(near, dtype=np.float64), np.asarray(far, dtype=np.float64)
        apart = np.asarray(far_stride, dtype=np.float64)
        in_run = np.clip(np.floor(self.pool.domain / np.asarray(stride, dtype=np.float64)), 1, count)
        whole_runs = np.clip(np.floor(self.pool.domain / apart), 1, runs)
        inside = np.where(apart <= self.pool.domain, count * whole_runs, in_run)
        return Group(count * runs, inside, ceil_divide(count * runs, inside))

    def all_reduce(self, num_bytes: Number, group: Group) -> Floats:
        """Return the seconds to reduce `num_bytes` over a group. Across domains: the faster of ring and tree."""
        size = np.asarray(num_bytes, dtype=np.float64)
        inside = self._inside("all-reduce", size, group.size)
        steps = 2 * (group.size - 1)
        steps_across = 2 * (group.domains - 1)
        by_ring = self._latency(steps, steps_across) + self._moved("all-reduce", size, group)
        depth = 2 * ((group.inside - 1) * _TREE_STEP_INSIDE + np.log2(np.maximum(group.domains, 1)) * self._step_across)
        by_tree = _CALL + depth + 2 * size / (0.85 * self._across(group))
        across = np.minimum(by_ring, by_tree)
        return np.where((group.size <= 1) | (size <= 0), 0.0, np.where(group.domains <= 1, inside, across))

    def all_gather(self, num_bytes: Number, group: Group) -> Floats:
        """Return the seconds to gather `num_bytes`, all parts together, on every rank. A reduce-scatter is the same."""
        size = np.asarray(num_bytes, dtype=np.float64)
        inside = self._inside("all-gather", size, group.size)
        latency = self._latency(group.size - 1, group.domains - 1)
        across = latency + self._moved("all-gather", size, group)
        return np.where((group.size <= 1) | (size <= 0), 0.0, np.where(group.domains <= 1, inside, across))

    def dispatch(self, num_bytes: Number, top_k: int, group: Group, *, once: bool) -> Floats:
        """Return the seconds to send rows of `num_bytes` in total to `top_k` experts each, spread evenly over a group.

        A row is sent to another domain once, however many of its experts are there (DeepEP, HybridEP). Of d domains, it
        needs d(1 - (1 - 1/d)^k) on average. Inside a domain it is sent once per expert, or with `once` once per rank.
        """
        size = np.asarray(num_bytes, dtype=np.float64)
        others = np.maximum(group.domains - 1, 0.0)
        far = others * (1.0 - (1.0 - 1.0 / group.domains) ** top_k)
        ranks = group.inside * (1.0 - (1.0 - 1.0 / group.size) ** top_k) if once else top_k * group.inside / group.size
        near = ranks * (group.inside - 1) / group.inside * group.domains
        latency = _CALL + self._step_inside * np.log2(np.maximum(group.size, 2))
        latency = latency + (group.domains > 1) * self._step_across
        moved = np.maximum(size * near / self._large(self.pool.node.link), size * far / self._nic)
        return np.where(group.size <= 1, 0.0, latency + moved)

    def inside_seconds(self, num_bytes: Number) -> Floats:
        """Return the seconds of `num_bytes` over the links inside a domain."""
        return np.asarray(num_bytes, dtype=np.float64) / self._large(self.pool.node.link)

    def all_to_all(self, num_bytes: Number, group: Group) -> Floats:
        """Return the seconds of an all-to-all in which each rank spreads its `num_bytes` evenly over the group."""
        size = np.asarray(num_bytes, dtype=np.float64)
        stays = (group.inside - 1) / group.size * size / self._large(self.pool.node.link)
        leaves = (group.size - group.inside) / group.size * size / self._nic
        latency = _CALL + self._step_inside * np.log2(np.maximum(group.size, 2))
        latency = latency + (group.domains > 1) * self._step_across
        return np.where(group.size <= 1, 0.0, latency + np.maximum(stays, leaves))

    def hop(self, num_bytes: Number, stride: Number, size: Number) -> Floats:
        """Return the seconds to send to the next of `size` ranks, `stride` apart, over the slowest boundary between."""
        amount = np.asarray(num_bytes, dtype=np.float64)
        across = np.asarray(stride, dtype=np.float64) * size > self.pool.domain
        link = self.pool.node.link
        near = _CALL + amount / (_HOP_REACHED * link.bytes_per_second)
        if link.is_measured:
            near = link.latency_seconds + amount / link.bytes_per_second
        far = _CALL + self.pool.node.fabric.latency_seconds + amount / self._nic
        return np.where(np.asarray(size) <= 1, 0.0, np.where(across, far, near))

    @property
    def _nic(self) -> float:
        fabric = self.pool.node.fabric
        return fabric.bytes_per_second * (1.0 if fabric.is_measured else self.nic_efficiency)

    @property
    def _step_across(self) -> float:
        fabric = self.pool.node.fabric
        return fabric.latency_seconds * (1 if fabric.is_measured else 2)

    @property
    def _step_inside(self) -> float:
        link = self.pool.node.link
        return link.latency_seconds if link.is_measured else _STEP_INSIDE

    def _curves(self, collective: str) -> list[Curve]:
        """Return a collective's curves inside a domain, by size of group: of a probe, or else of links of this name."""
        probed = [curve for curve in self.pool.node.curves if curve.collective == collective]
        known = CURVES.get(self.pool.node.link.name)
        return sorted(probed, key=lambda curve: curve.num_devices) or ([known] if known else [])

    def _large(self, link: Link) -> float:
        """Return the bus bandwidth of large messages around a ring inside one domain."""
        curves = self._curves("all-gather")
        if curves:
            share = RING_SHARE.get(link.name, 1.0) if curves[-1].collective == "all-reduce" else 1.0
            return curves[-1].bus_rates()[-1] * share
        if link.is_measured:
            return link.bytes_per_second
        return _REACHED * link.bytes_per_second / (2.0 if link.is_shared else 1.0)

    def _across(self, group: Group) -> Floats:
        """Return the bus bandwidth of a ring over several domains: the lower of the links inside and the NICs."""
        fabric = self.pool.node.fabric
        nics = group.inside * self._nic / (1.0 if fabric.rails else fabric.oversubscription)
        return np.minimum(nics, self._large(self.pool.node.link))

    def _moved(self, collective: str, size: Floats, group: Group) -> Floats:
        """Return the seconds, without latency, of a ring over several domains."""
        return bus_factor(collective, group.size) * size / self._across(group)

    def _latency(self, steps: Number, steps_across: Number) -> Floats:
        inside = np.asarray(steps, dtype=np.float64) - steps_across
        return _CALL + inside * self.pool.node.link.latency_seconds + np.asarray(steps_across) * self._step_across

    def _inside(self, collective: str, size: Floats, count: Floats) -> Floats:
        """Return the seconds inside a domain: from the curve with most devices up to `count`, or from a formula."""
        curves = self._curves(collective)
        link = self.pool.node.link
        if not curves:
            moved = bus_factor("all-reduce", count) * size
            reduced = self._latency(2 * (count - 1), 0) + moved / self._large(link)
            return reduced if collective == "all-reduce" else reduced / 2
        found = _scaled(curves[0], size, count)
        for curve in curves[1:]:
            found = np.where(count >= curve.num_devices, _scaled(curve, size, count), found)
        # An all-gather moves half the bytes of an all-reduce, and has no use for sums in the switch.
        is_half = collective != "all-reduce" and curves[0].collective == "all-reduce"
        return found / 2 / RING_SHARE.get(link.name, 1.0) if is_half else found


def _scaled(curve: Curve, size: Floats, count: Floats) -> Floats:
    """Interpolate a measured curve, with its latency and its bus factor scaled to `count` devices."""
    seconds, log_sizes, log_seconds = _arrays(curve)
    measured: Floats = np.exp(np.interp(np.log(np.maximum(size, 1.0)), log_sizes, log_seconds))
    beyond = np.maximum(size / curve.sizes[-1], 1.0)
    factor = bus_factor(curve.collective, count) / bus_factor(curve.collective, curve.num_devices)
    fixed: Floats = seconds[0] * (count - 1) / (curve.num_devices - 1)
    moving: Floats = np.maximum(measured * beyond - seconds[0], 0.0) * factor
    return fixed + moving


@cache
def _arrays(curve: Curve) -> tuple[Floats, Floats, Floats]:
    """Return the seconds, and the logarithms of sizes and seconds."""
    # Some larger messages were measured as faster. A prediction that increases with size is easier to search.
    seconds: Floats = np.maximum.accumulate(curve.seconds)
    return seconds, np.log(curve.sizes), np.log(seconds)
