"""The error for a model that fits nowhere on a cluster: what is missing, and how many of which devices would do."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from shardwise.cluster.catalogue import DEVICES
from shardwise.cluster.cluster import Cluster, make_pool
from shardwise.cost.step import HOST_TAKEN, Estimate
from shardwise.errors import ShardwiseError
from shardwise.model.adapters import with_lora
from shardwise.planner.plan import largest_divisor
from shardwise.planner.question import Question
from shardwise.planner.search.axes import leanest, spread_axes
from shardwise.planner.search.choices import (
    offloads,
    offloads_by_recomputation,
    precisions,
    recomputations,
    schedules,
    with_offloads,
    with_schedules,
    with_zeros,
    zeros,
)
from shardwise.planner.search.tally import Tally
from shardwise.units import format_bytes

_MOST_DEVICES = 16_384
# The number of axes to try for a larger cluster, those with the least memory first.
_LEANEST = 64
# Descriptions of parts of memory whose names do not say it.
_PARTS = {"loss": "the loss", "optimizer": "optimizer states", "masters": "master weights", "scores": "attention"}
# The rank of adapters to suggest instead.
_USUAL_RANK = 16


def nowhere(question: Question, tally: Tally) -> ShardwiseError:
    """Return the error for a question without an answer."""
    model, cluster = question.model.name, question.cluster
    asked = f"{model} with a batch of {question.batch} x {question.sequence}"
    wrong = _uneven(question) or _no_experts(question) or _no_groups(question)
    if wrong is not None:
        return wrong
    if question.fixed:
        asked += f" and {','.join(f'{key}={_as_typed(value)}' for key, value in question.fixed.items())}"
    if not tally.memory:
        counts = ", ".join(f"{count} by {reason}" for reason, count in tally.refused.most_common())
        return ShardwiseError(
            f"no plan spreads {asked} over the {cluster.num_devices} devices of {cluster}: all are ruled out"
            + (f", {counts}" if counts else ""),
            remedy=_divisible(question),
        )
    return ShardwiseError(f"{asked} does not fit on {cluster}: {_needs(question)}", remedy=_larger(question))


def _needs(question: Question) -> str:
    """Return what the leanest plan needs: on a rank; or on the host, if it fits the ranks with the host's help."""
    priced = _lean_prices(question, next(precisions(question)), only_fitting=False)
    assert priced is not None, "what lacks memory was divided over the devices"
    held = priced.bytes
    node, room = question.cluster.pools[0].node, question.device.memory_bytes
    on_host, there = held.host * node.devices_per_node, HOST_TAKEN * node.host.memory_bytes
    fits_ranks, fits_host = held.peak <= room, on_host <= there
    # Both fit by closed forms alone; or else it is compared with nothing on the host, if all can stay.
    just_fits, stays = fits_ranks & fits_host, fits_ranks.any() & (on_host == 0)
    among = just_fits if just_fits.any() else stays if stays.any() else np.ones_like(stays)
    row = int(np.where(among, held.peak, np.inf).argmin())
    part = max(held.parts, key=lambda name: float(held.parts[name][row].max()))
    words = f"the leanest plan needs {format_bytes(float(held.peak[row]))} on a rank that has {format_bytes(room)}"
    words += f", most of it for {_PARTS.get(part, part)}"
    if not fits_ranks.any():
        return words
    if just_fits.any():
        return f"{words}, which is too close"
    words += f", or {format_bytes(float(on_host[fits_ranks].min()))} on a host that has {format_bytes(there)} for it"
    return f"{words}; hosts are assumed to have {format_bytes(node.host.memory_bytes)}, which a cluster.toml can change"


def _uneven(question: Question) -> ShardwiseError | None:
    """Return the error for fixed sizes that do not divide the devices."""
    devices = question.cluster.num_devices
    sizes = {axis: int(question.fixed[axis]) for axis in ("dp", "tp", "pp", "cp") if axis in question.fixed}
    product = prod(sizes.values())
    steps = int(question.fixed.get("microbatches", 1))
    if question.batch % steps:
        return ShardwiseError(
            f"microbatches={steps} does not divide a batch of {question.batch}",
            remedy=f"--fix microbatches={largest_divisor(question.batch, steps)}",
        )
    if devices % product == 0:
        return None
    said = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    axis, size = max(sizes.items(), key=lambda item: devices % item[1] != 0)
    left = max(devices * size // product, 1)
    nearest_size = max(each for each in range(1, min(size, left) + 1) if left % each == 0)
    instead = ",".join(f"{each}={nearest_size if each == axis else own}" for each, own in sizes.items())
    return ShardwiseError(
        f"{said} does not divide the {devices} devices of {question.cluster}", remedy=f"--fix {instead}"
    )


def _no_experts(question: Question) -> ShardwiseError | None:
    """Return the error for expert parallelism with no experts, or with fewer experts than ranks."""
    ep, have = int(question.fixed.get("ep", 1)), question.num_experts
    if have % ep == 0:
        return None
    return ShardwiseError(
        f"{question.model.name} {question.experts_text}, which ep={ep} cannot share out",
        remedy=f"--fix ep={largest_divisor(have, ep)}",
    )


def _no_groups(question: Question) -> ShardwiseError | None:
    """Return the error for a fixed ZeRO group that is larger than any number of replicas."""
    group, devices = int(question.fixed.get("zero_group", 1)), question.cluster.num_devices
    if devices % group == 0:
        return None
    return ShardwiseError(
        f"zero_group={group} does not divide the replicas that {devices} devices can be",
        remedy=f"--fix zero_group={largest_divisor(devices, group)}",
    )


def _as_typed(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def feasible(question: Question) -> bool:
    """Whether any plan fits, tried with the axes that need the least memory."""
    prices = (_lean_prices(question, precision) for precision in precisions(question))
    return any(each is not None and bool(each.fits.any()) for each in prices)


def _lean_prices(question: Question, precision: str, *, only_fitting: bool = True) -> Estimate | None:
    """Price plans with the axes that need the least memory; `only_fitting`: only axes that may fit by a bound. Return
    None if there are none."""
    axes = spread_axes(question, Tally(), 1)
    if len(axes) == 0:
        return None
    software, on_host = question.software_in(precision), offloads(question)
    held, fits = leanest(question, axes, software, on_host)
    chosen = np.argsort(held.peak)[:_LEANEST]
    chosen = chosen[fits[chosen] | (not only_fitting)]
    if len(chosen) == 0:
        return None
    again = [max(recomputations(question))]  # Of all layers, if that may be chosen.
    layouts = with_schedules(axes.take(chosen), schedules(question), again, max(question.model.num_layers, 1))
    # Not only the largest offload: the host may have memory for a part.
    choices = on_host[offloads_by_recomputation(question, on_host)[again[0][0]]]
    domain = min(question.cluster.pools, key=lambda pool: pool.device.memory_bytes).domain
    return question.price(with_offloads(with_zeros(layouts, zeros(question, domain)), choices), software)


def _larger(question: Question) -> str:
    """Suggest the smallest sufficient clusters of this device and of a larger one; or adapters, if they fit."""
    clusters = ", or ".join(str(each) for each in (_more(question), _other(question)) if each is not None)
    words = [f"--cluster {clusters}"] if clusters else []
    if question.fixed and feasible(replace(question, fixed={})):
        words.insert(0, "no --fix")
    if not question.model.is_partly_frozen and question.cuts_layers:
        adapted = replace(question, model=with_lora(question.model, _USUAL_RANK))
        words += [f"--lora {_USUAL_RANK}"] if feasible(adapted) else []
    return ", or ".join(words) or "a smaller model, or shorter sequences"


def _more(question: Question) -> Cluster | None:
    """Return the smallest sufficient cluster of the same devices, doubling whole nodes."""
    for cluster in doubled(question.cluster):
        if feasible(replace(question, cluster=cluster, fixed={})):
            return cluster
    return None


def doubled(cluster: Cluster) -> Iterator[Cluster]:
    """Yield larger clusters of the first pool's devices, each twice as large as the one before."""
    pool = cluster.pools[0]
    usual = make_pool(pool.device.name) if pool.device.name in DEVICES else pool
    nodes, devices = pool.num_nodes, pool.node.devices_per_node
    while nodes * devices < _MOST_DEVICES:
        if devices < usual.node.devices_per_node:
            devices = min(2 * devices, usual.node.devices_per_node)
        else:
            nodes *= 2
        node = replace(pool.node, devices_per_node=devices, domain=max(pool.node.domain, devices))
        yield Cluster(pools=(replace(pool, num_nodes=nodes, node=node),))


def _other(question: Question) -> Cluster | None:
    """Return a cluster of as many devices with more memory: the smallest sufficient kind for the same work."""
    pool = question.cluster.pools[0]
    family = [each for each in ("h200", "b200", "b300") if DEVICES[each].memory_bytes > pool.device.memory_bytes]
    if pool.device.architecture == "cpu":
        return None
    for name in family:
        bigger = make_pool(name, num_nodes=pool.num_nodes, devices_per_node=pool.node.devices_per_node)
        cluster = Cluster(pools=(bigger,))
        if feasible(replace(question, cluster=cluster, fixed={})):
            return cluster
    return None


def _divisible(question: Question) -> str:
    """Suggest a batch that can be divided, or fewer devices."""
    devices = question.cluster.num_devices
    if question.batch % devices:
        return f"--batch {max(devices, question.batch - question.batch % devices)}"
    return "fewer devices, or no --fix" if question.fixed else "fewer devices"
