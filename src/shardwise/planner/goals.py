"""Goals other than the fastest step on all devices: fewest devices for a target time, lowest cost for given prices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardwise.cluster.cluster import Cluster, Pool
from shardwise.cost.bounds import least_seconds
from shardwise.errors import ShardwiseError
from shardwise.planner.question import Question
from shardwise.planner.search.axes import spread_axes
from shardwise.planner.search.choices import precisions
from shardwise.planner.search.findings import Findings, find_plan_if_any
from shardwise.planner.search.tally import Tally
from shardwise.units import counted, format_seconds

_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The findings of a search, and the cost of a step."""

    findings: Findings
    price_of_step: float


def fewest_devices(question: Question, seconds: float) -> Findings:
    """Return the plan on the fewest devices of the cluster whose step takes at most `seconds`."""
    nearest: Findings | None = None
    for part in parts_of(question.cluster):
        smaller = replace(question, cluster=part)
        if _least_seconds(smaller) > seconds:
            continue
        found = find_plan_if_any(smaller, Tally())
        if found is None:
            continue
        in_time = found.within(seconds)
        if in_time is not None:
            return in_time
        if nearest is None or found.best.seconds < nearest.best.seconds:
            nearest = found
    fastest = nearest or find_plan_if_any(question, Tally())
    reached = "nothing fits" if fastest is None else f"the fastest takes {format_seconds(fastest.best.seconds)}"
    raise ShardwiseError(
        f"no plan on up to {counted(question.cluster.num_devices, 'device')} takes {format_seconds(seconds)} a step: "
        f"{reached}",
        remedy=None if fastest is None else f"--target {format_seconds(fastest.best.seconds * 1.01).replace(' ', '')}",
    )


def cheapest(question: Question, prices: Mapping[str, float], seconds: float | None = None) -> Priced:
    """Return the plan with the lowest cost of a step on any part of the cluster. `prices`: of a device-hour, by name.

    With `seconds`, only steps that take at most this long count.
    """
    best: Priced | None = None
    for part in parts_of(question.cluster):
        rate = sum(pool.num_devices * _price_of(pool, prices) for pool in part.pools) / _HOUR
        smaller = replace(question, cluster=part)
        least = _least_seconds(smaller)
        if (best is not None and least * rate >= best.price_of_step) or (seconds is not None and least > seconds):
            continue
        found = find_plan_if_any(smaller, Tally())
        if found is not None and seconds is not None:
            found = found.within(seconds)
        if found is None:
            continue
        price = found.best.seconds * rate
        if best is None or price < best.price_of_step:
            best = Priced(findings=found, price_of_step=price)
    if best is None:
        limit = "" if seconds is None else f" and takes at most {format_seconds(seconds)} a step"
        raise ShardwiseError(f"no plan fits {question.cluster} or a part of it{limit}", remedy="a larger cluster")
    return best


def faster_pool(question: Question, seconds: float) -> Findings | None:
    """Return the best plan on a single one of several pools, if its step takes less than `seconds`. A step on all pools
    takes as long as on the slowest."""
    best: Findings | None = None
    for pool in question.cluster.pools if len(question.cluster.pools) > 1 else ():
        alone = replace(question, cluster=Cluster(pools=(pool,)))
        try:
            found = find_plan_if_any(alone, Tally()) if _least_seconds(alone) < seconds else None
        except ShardwiseError:
            continue  # The fixed keys are for all devices.
        if found is not None and found.best.seconds < seconds:
            best, seconds = found, found.best.seconds
    return best


def parts_of(cluster: Cluster) -> Iterator[Cluster]:
    """Yield parts of a cluster that a job could be allocated, smallest first: parts of a node, then whole nodes."""
    parts = {
        (count * devices, str(pool.device.name), count): Cluster(
            pools=(replace(pool, num_nodes=count, node=pool.node.resized(devices)),)
        )
        for pool in cluster.pools
        for count, devices in _sizes(pool)
    }
    for key in sorted(parts, key=lambda key: key[0]):
        yield parts[key]
    if len(cluster.pools) > 1:
        yield cluster


def _sizes(pool: Pool) -> Iterator[tuple[int, int]]:
    """Yield the number of nodes, and devices in each: 1, 2, 4 in a node; then 1, 2, 3, 4, 6, 8, 12 nodes, up to all."""
    per_node = pool.node.devices_per_node
    size = 1
    while size < per_node:
        yield 1, size
        size *= 2
    counts = {2**power * odd for power in range(20) for odd in (1, 3)} | {pool.num_nodes}
    for count in sorted(counts):
        if count <= pool.num_nodes:
            yield count, per_node


def _least_seconds(question: Question) -> float:
    """Return a lower bound of the step of any plan, whether it fits or not."""
    axes = spread_axes(question, Tally(), 1)
    if len(axes) == 0:
        return float("inf")
    software = question.software_in(next(precisions(question)))
    return float(
        least_seconds(question.model, question.cluster, axes, sequence=question.sequence, software=software).min()
    )


def _price_of(pool: Pool, prices: Mapping[str, float]) -> float:
    if pool.device.name not in prices:
        raise ShardwiseError(f"an hour of {pool.device.name} has no price", remedy=f"--prices {pool.device.name}=2.50")
    return prices[pool.device.name]
