"""The plan of a run: what the planner finds for this machine where none was given, and what it says of the host."""

from dataclasses import replace
from typing import Any

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.device import Device
from shardwise.cluster.local import available_bytes, local_cluster
from shardwise.cost.software import Software
from shardwise.errors import ShardwiseError
from shardwise.planner.account import hold
from shardwise.planner.host_memory import check_host_memory
from shardwise.planner.plan import Offload, Plan
from shardwise.planner.planning import plan
from shardwise.planner.question import make_question, usual_software
from shardwise.training.data.source import check_data
from shardwise.training.job import Job
from shardwise.training.machine import cluster_here
from shardwise.training.recipe import Recipe
from shardwise.training.subject import subject_of

#: Bytes of a number's state, with the number itself in full precision: one moment, or Adam's two as they are kept. In
#: 8 bits both have a scale for each 256 numbers.
_STATE_BYTES = {("sgd", "fp32"): 8, ("adamw", "fp32"): 12, ("adamw", "bf16"): 8, ("adamw", "8bit"): 6 + 8 / 256}


def choose_plan(recipe: Recipe, num_devices: int, cluster: Cluster | None = None) -> Plan:
    """The fastest plan for a recipe's step on so many devices (of this cluster), with its reasons."""
    on = cluster_here(num_devices) if cluster is None else cluster
    return plan(**asked_of(recipe), cluster=on, fixed={"precision": recipe.precision})


def find_resized(given: Plan, num_ranks: int, num_rows: int) -> Plan | None:
    """The same plan with other replicas, so that it has so many ranks and the batch is still shared out evenly."""
    in_replica = given.num_ranks // given.dp
    if num_ranks % in_replica or num_rows % (num_ranks // in_replica * given.microbatches):
        return None
    try:
        return replace(given, dp=num_ranks // in_replica, zero_group=None)
    except ShardwiseError:
        return None


def check_host(job: Job) -> None:
    """Refuse a plan whose ranks, all of them here, keep more on the host by the planner's count than is available.

    It is asked before any rank is started. Each engine counts its own state again, exactly, before it takes any memory.
    """
    if job.plan.offload == Offload():
        return
    if job.recipe.optimizer.states == "8bit" and (job.plan.offload.optimizer or job.plan.offload.parameters):
        raise ShardwiseError(
            "optimizer.states=8bit has a scale for each 256 numbers, and state on the host comes in pieces of any"
            " length",
            remedy="--set optimizer.states=bf16, or a plan without offload.optimizer and offload.parameters",
        )
    cluster = local_cluster(job.plan.num_ranks)
    software = software_for(job.recipe, cluster.pools[0].device)
    question = make_question(**asked_of(job.recipe), cluster=cluster, software=software)
    needed = sum(rank.on_host * rank.num_ranks for rank in hold(question, job.plan))
    check_host_memory(job.plan, needed, num_ranks=job.plan.num_ranks, available=available_bytes())


def software_for(recipe: Recipe, device: Device) -> Software:
    """What our own software does on a device, with what the recipe's optimizer keeps, and the masks of its rows."""
    return replace(
        usual_software(device, is_wide=True),  # Modules are made in fp32, whatever they compute in.
        state_bytes=_STATE_BYTES[recipe.optimizer.name, recipe.optimizer.states],
        # Where it is left open: transformers of ours take them. Modules of users were asked before.
        masks_documents=recipe.model.source is None if recipe.data.masks is None else recipe.data.masks,
    )


def asked_of(recipe: Recipe) -> dict[str, Any]:
    """The model and the batch of a recipe, as the planner takes them."""
    subject = subject_of(recipe, check_data(recipe.data, verify=False))
    return {**subject.for_planner(), "batch": recipe.batch}
