"""`sw.replica_of`: which rows a process has to load, if every replica loads its own."""

import torch.distributed as dist

from shardwise.planner.plan import Plan
from shardwise.ranks.mesh import Replica, replicas_of
from shardwise.ranks.worker import join_if_launched


def replica_of(plan: Plan | str) -> Replica:
    """Return the index of the data parallel replica that this process belongs to, and the number of replicas.

    index, count = sw.replica_of(plan)
    sampler = DistributedSampler(data, num_replicas=count, rank=index)

    Ranks of one replica (tp, pp, cp) have the same index: they load the same rows. Under `torchrun` the processes are
    joined here, if the script has not done so. A single process is the only replica.
    """
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    join_if_launched()
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Replica(0, 1)
    chosen.check_world(dist.get_world_size())
    return replicas_of(chosen)[dist.get_rank()]
