"""The cluster that the user names for a run: the plan for it, and the device (seat) of each rank."""

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.file import find_cluster
from shardwise.errors import ShardwiseError
from shardwise.planner.placement.seats import Seats, seats_for
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question
from shardwise.training.choose import asked_of, choose_plan, find_resized, software_for
from shardwise.training.recipe import Recipe
from shardwise.units import counted


def cluster_of_ranks(word: str | None, count: int) -> Cluster | None:
    """Return the named cluster, which must have a device for each rank; None if none is named."""
    if word is None:
        return None
    cluster = find_cluster(word)
    if cluster.num_devices != count:
        raise ShardwiseError(
            f"--cluster {word} has {counted(cluster.num_devices, 'device')}, and the run {counted(count, 'rank')}",
            remedy=f"--devices {cluster.num_devices}, or a cluster of {count}: shardwise probe --save cluster.toml",
        )
    return cluster


def fitting(word: str | None, count: int) -> str | None:
    """Return `word` if its cluster has a device for each rank. If a run resumes with another count, it is outdated."""
    return word if word is not None and find_cluster(word).num_devices == count else None


def choose_plan_on(recipe: Recipe, count: int, word: str | None) -> Plan:
    """Return the fastest plan for a recipe's step on `count` devices of the named cluster, or of this machine."""
    return choose_plan(recipe, count, cluster_of_ranks(word, count))


def resize_plan_on(plan: Plan, recipe: Recipe, count: int, word: str | None) -> tuple[Plan, str]:
    """Return a plan for a run that resumes with more or fewer ranks than `plan` has, and a sentence about it. It is
    `plan` with another dp if the batch allows it, else the planner's choice."""
    resized = find_resized(plan, count, recipe.batch)
    how = "the same with other replicas" if resized is not None else "chosen anew"
    found = resized if resized is not None else choose_plan_on(recipe, count, fitting(word, count))
    ranks = counted(plan.num_ranks, "rank")
    return found, f"plan {plan} is for {ranks}, and there are {count}: it goes on under {found}, {how}"


def find_seats(recipe: Recipe, plan: Plan, num_devices: int, word: str | None) -> Seats | None:
    """Return the seats of a plan's ranks on the named cluster, or None if they are in plain order."""
    if num_devices == 1 and word is not None:
        return None  # One process runs all ranks.
    cluster = cluster_of_ranks(word, num_devices)
    if cluster is None:
        return None
    software = software_for(recipe, cluster.pools[0].device)
    seats = seats_for(make_question(**asked_of(recipe), cluster=cluster, software=software), plan)
    return None if seats.is_plain else seats
