"""The processes of this computer as a cluster: `train --plan auto` plans for it if there is no GPU."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from shardwise import environment
from shardwise.cluster.cluster import Cluster, make_pool

# Share of this computer's memory for all its ranks. The rest is for the system and the parent process.
_FOR_RANKS = 0.8


def local_cluster(num_processes: int) -> Cluster:
    """Return a cluster of processes that share this computer's memory, and take turns if cores are too few."""
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
    """Return the size of this computer's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_bytes() -> int:
    """Return the peak memory of this process so far."""
    import resource  # Not available on Windows.

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes.


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory available without swapping, as Linux reports it, within the limit of this container.

    On other systems it is unknown, and the result is no limit (2**62).
    """
    found = [2**62]
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    group = root / "sys/fs/cgroup"
    limit, used = (_lines(group / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdecimal():
        # The control group counts cached files as used, although they can be evicted.
        told = [line.split() for line in _lines(group / "memory.stat")]
        cached = sum(int(words[1]) for words in told if words[0] == "inactive_file")
        found.append(max(int(limit[0]) - int(used[0]) + cached, 0))
    return min(found)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
