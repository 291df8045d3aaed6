"""The processes of this computer as a cluster: what `train --plan auto` plans for where there is no GPU."""

import os
from dataclasses import replace

from shardwise import environment
from shardwise.cluster.cluster import Cluster, make_pool

# Of this computer's memory, how much its ranks may have together: the rest is the system's and the parent's.
_FOR_RANKS = 0.8


def local_cluster(num_processes: int) -> Cluster:
    """So many processes that share this computer's memory and cores. More processes than cores take turns."""
    pool = make_pool("cpu", devices_per_node=num_processes)
    turns = min(environment.num_cores() / num_processes, 1.0)
    device = replace(
        pool.device,
        memory_bytes=int(_FOR_RANKS * memory_bytes() / num_processes),
        flops_per_second={name: rate * turns for name, rate in pool.device.flops_per_second.items()},
        memory_bytes_per_second=pool.device.memory_bytes_per_second * turns,
    )
    return Cluster(pools=(replace(pool, device=device),))


def memory_bytes() -> int:
    """This computer's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
