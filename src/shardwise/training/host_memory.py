"""Whether this machine's host has room for what a run's plan keeps there, asked before any rank is started."""

from dataclasses import replace

from shardwise.cluster.local import available_bytes, local_cluster
from shardwise.planner.account import hold
from shardwise.planner.host_memory import check_host_memory
from shardwise.planner.plan import Offload
from shardwise.planner.question import make_question, usual_software
from shardwise.training.choose import vocabulary_of
from shardwise.training.job import Job
from shardwise.training.subject import subject_of

#: Bytes of a number's state in full precision, with the number itself: one moment, or Adam's two.
_STATE_BYTES = {"sgd": 8, "adamw": 12}


def check_host(job: Job) -> None:
    """Refuse a plan whose ranks, all of them here, keep more on the host by the planner's count than is available.

    Each engine counts its own state again, exactly, before it takes any memory.
    """
    if job.plan.offload == Offload():
        return
    cluster = local_cluster(job.plan.num_ranks)
    software = replace(usual_software(cluster.pools[0].device), state_bytes=_STATE_BYTES[job.recipe.optimizer.name])
    question = make_question(
        **subject_of(job.recipe, vocabulary_of(job.recipe)).for_planner(),
        cluster=cluster,
        batch=job.recipe.batch,
        software=software,
    )
    needed = sum(rank.hosted * rank.num_ranks for rank in hold(question, job.plan))
    check_host_memory(job.plan, needed, num_ranks=job.plan.num_ranks, available=available_bytes())
