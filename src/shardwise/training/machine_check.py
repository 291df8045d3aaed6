"""Checks that this machine can run a job, made before any rank is started."""

from dataclasses import replace

from shardwise import environment
from shardwise.cluster.catalogue import find_device
from shardwise.cluster.cluster import Cluster, make_pool
from shardwise.cost.pipeline import SCHEDULES
from shardwise.planner.account import hold
from shardwise.planner.question import make_question
from shardwise.ranks.gpus import Found, Gpus, check_any, check_fits, check_one_each, check_precision, find_gpus
from shardwise.training.choose import asked_of, check_host, software_for
from shardwise.training.exporter import check_exporter
from shardwise.training.job import Job

# A GPU that is not in the catalogue is treated as this one, with its own memory size.
_USUAL = "h100-80g"
# The planner may overestimate memory by this factor. A run that fits must never be refused.
_TRUSTED = 1.15


def check_machine(job: Job, num_devices: int, gpus: Gpus) -> None:
    """Refuse a run for which this machine lacks the GPUs, the host memory, or a free metrics port."""
    check_gpus(job, num_devices, gpus)
    if environment.place_under_torchrun() is None or environment.rank_under_torchrun() == 0:
        check_exporter(job.watching)
    if environment.place_under_torchrun() is None:
        check_host(job)


def check_gpus(job: Job, num_devices: int, gpus: Gpus, found: Found | None = None) -> None:
    """Refuse a run for which this machine's GPUs are missing, too few, too old or too small."""
    here = find_gpus() if found is None else found
    if gpus == "shared":
        check_any(here, "--share-gpus", "leave it out, and ranks compute on processors")
    if not here.gpus:
        return
    if gpus == "own" and environment.place_under_torchrun() is None:
        check_one_each(here, num_devices)
    check_precision(here.gpus, job.plan.precision, "--set precision=fp16", key="--set precision")
    _check_memory(job, here, num_devices if environment.place_under_torchrun() is None else len(here.gpus))


def _check_memory(job: Job, here: Found, num_here: int) -> None:
    """Check memory by the planner's account of every rank, which `shardwise fit` shows part by part."""
    plan = job.plan
    if plan.schedule not in (*SCHEDULES, "auto"):
        return
    smallest = min(here.gpus, key=lambda gpu: gpu.memory_bytes)
    pool = make_pool(find_device(smallest.name) or _USUAL, devices_per_node=plan.num_ranks)
    device = replace(pool.device, memory_bytes=smallest.memory_bytes)
    cluster = Cluster(pools=(replace(pool, device=device),))
    question = make_question(**asked_of(job.recipe), cluster=cluster, software=software_for(job.recipe, device))
    fullest = max(hold(question, plan), key=lambda rank: rank.total)
    largest = ", ".join(sorted(fullest.parts, key=lambda part: -fullest.parts[part])[:2])
    check_fits(
        fullest.total / _TRUSTED,
        smallest,
        what=f"{job.recipe.name} under {plan} (mostly {largest})",
        sharing=-(-num_here // len(here.gpus)),
        remedy="--plan auto, or a plan with recompute=full, zero=3 or offload.optimizer=1; or --set batch= with less",
    )
