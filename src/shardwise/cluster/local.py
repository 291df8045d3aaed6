"""The processes of this computer as a cluster: what `train --plan auto` plans for where there is no GPU."""

import os
import sys
from dataclasses import replace
from pathlib import Path

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
        kernels=tuple(kernel.taking_turns(turns) for kernel in pool.device.kernels),
    )
    return Cluster(pools=(replace(pool, device=device),))


def memory_bytes() -> int:
    """This computer's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far."""
    import resource  # Not on every system: Windows has none.

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes.


def available_bytes(root: Path = Path("/")) -> int:
    """What can be had of this computer's memory without swapping, as Linux says it, within this container's limit.

    Elsewhere it is not known, and no limit.
    """
    found = [2**62]
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    group = root / "sys/fs/cgroup"
    limit, used = (_lines(group / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdecimal():
        # Files that were read and can be forgotten count as used there.
        told = [line.split() for line in _lines(group / "memory.stat")]
        cached = sum(int(words[1]) for words in told if words[0] == "inactive_file")
        found.append(max(int(limit[0]) - int(used[0]) + cached, 0))
    return min(found)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
