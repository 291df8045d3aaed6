"""The plan of a run: the planner's choice for this machine if none is given, and its check of host memory."""

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

#: Bytes of state for each parameter: the parameter in fp32, and one moment (SGD) or two (Adam) in their format. In 8
#: bits, each moment has a scale for 256 elements.
_STATE_BYTES = {("sgd", "fp32"): 8, ("adamw", "fp32"): 12, ("adamw", "bf16"): 8, ("adamw", "8bit"): 6 + 8 / 256}


def choose_plan(recipe: Recipe, num_devices: int, cluster: Cluster | None = None) -> Plan:
    """Return the fastest plan for a recipe's step on `num_devices` devices (of this cluster), with its reasons."""
    on = cluster_here(num_devices) if cluster is None else cluster
    return plan(**asked_of(recipe), cluster=on, fixed={"precision": recipe.precision})


def find_resized(given: Plan, num_ranks: int, num_rows: int) -> Plan | None:
    """Return the plan with another dp, such that it has `num_ranks` ranks and divides the batch; None if impossible."""
    in_replica = given.num_ranks // given.dp
    if num_ranks % in_replica or num_rows % (num_ranks // in_replica * given.microbatches):
        return None
    try:
        return replace(given, dp=num_ranks // in_replica, zero_group=None)
    except ShardwiseError:
        return None


def check_host(job: Job) -> None:
    """Refuse a plan whose ranks, all on this machine, need more host memory, as the planner estimates, than there is.

    This runs before any rank is started. Each engine checks its exact need again before it allocates.
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
    """Return the costs of our software on a device, with the recipe's optimizer state and document masks."""
    return replace(
        usual_software(device, is_wide=True),  # Modules are made in fp32, whatever their compute precision.
        state_bytes=_STATE_BYTES[recipe.optimizer.name, recipe.optimizer.states],
        # If unset: our transformers take masks. For users' modules it was decided before.
        masks_documents=recipe.model.source is None if recipe.data.masks is None else recipe.data.masks,
    )


def asked_of(recipe: Recipe) -> dict[str, Any]:
    """Return the model and the batch of a recipe, as the planner takes them."""
    subject = subject_of(recipe, check_data(recipe.data, verify=False))
    return {**subject.for_planner(), "batch": recipe.batch}
