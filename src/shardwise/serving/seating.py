"""Choose the device of each rank of a served plan: on a named cluster, the placement with the cheapest communication,
as in training.

Ranks of a stage all-reduce the outputs of attention and MLP in each layer, so they get the fastest links. Stages pass
hidden states on, so neighbours are placed close. Replicas send each other nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.file import find_cluster
from shardwise.errors import ShardwiseError
from shardwise.nets.settings import Settings
from shardwise.planner.placement.seats import Seats, take_seats
from shardwise.planner.placement.ways import ways_of
from shardwise.planner.plan import Plan
from shardwise.ranks.gpus import Found, Gpu, find_gpus
from shardwise.serving.shards import Shard
from shardwise.units import counted

#: All-reduces per layer among the ranks of a stage: after attention, and after the MLP.
_SUMS_OF_A_LAYER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """For each replica the environment of its ranks, and their GPUs; on a named cluster also the seats."""

    variables: tuple[dict[str, str], ...]
    gpus: tuple[tuple[Gpu, ...], ...]
    seats: Seats | None = None


def seat(settings: Settings, shard: Shard, num_replicas: int, plan: str, cluster: str | None) -> Seating:
    """Choose GPUs of this machine, or of a named cluster, for all ranks of a plan."""
    seats = None if cluster is None else seats_of(settings, shard, num_replicas, find_cluster(cluster))
    found = find_gpus()
    places = range(num_replicas * shard.num_ranks) if seats is None else seats.devices
    runs = [places[first : first + shard.num_ranks] for first in range(0, len(places), shard.num_ranks)]
    variables = gpus_of(runs, found, plan)
    gpus = tuple(tuple(found.gpus[each] for each in run) for run in runs) if found.gpus else ((),) * num_replicas
    return Seating(variables=variables, gpus=gpus, seats=seats)


def seats_of(settings: Settings, shard: Shard, num_replicas: int, cluster: Cluster) -> Seats:
    """Return the devices of all ranks, replica by replica, by what they communicate per token."""
    num_ranks, size = shard.num_ranks * num_replicas, shard.tp * shard.ep
    if cluster.num_devices != num_ranks:
        raise ShardwiseError(
            f"the cluster has {counted(cluster.num_devices, 'device')}, and the plan {counted(num_ranks, 'rank')}",
            remedy="a plan that takes all of them; or no --cluster",
        )
    # The engine's rank order: replicas outermost, then stages.
    plan = Plan(dp=num_replicas, pp=shard.pp, tp=size, order="dp-pp-cp-tp")
    sums = _SUMS_OF_A_LAYER * settings.num_layers / shard.pp
    num_bytes = {"tp": 2 * (size - 1) / size * sums * settings.width, "pp": float(settings.width)}
    return take_seats(plan, num_bytes, ways_of(cluster))


def gpus_of(runs: Sequence[Sequence[int]], found: Found, plan: str) -> tuple[dict[str, str], ...]:
    """For each replica, return the environment that makes only its GPUs visible. Empty without GPUs."""
    total, here = sum(map(len, runs)), len(found.gpus)
    if not here:
        return ({},) * len(runs)
    if total > here:
        raise ShardwiseError(
            f"the plan {plan} takes {counted(total, 'GPU')}, and {here} {'is' if here == 1 else 'are'} here",
            remedy="a plan of fewer ranks; or CUDA_VISIBLE_DEVICES= to serve on CPUs",
        )
    # In CUDA's numbering: the GPUs visible to this process, or their names in its own variable.
    seen = found.visible.split(",")[:here] if found.visible else [str(number) for number in range(here)]
    return tuple({"CUDA_VISIBLE_DEVICES": ",".join(seen[each] for each in run)} for run in runs)
