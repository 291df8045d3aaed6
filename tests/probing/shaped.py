"""A probe of ranks in namespaces with shaped links, as a program: python -m tests.probing.shaped 16 4

Groups of neighbours have 200 Mbit/s, others 50, and one link between two groups has a tenth of that.
"""

import json
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.cluster.file import from_toml, to_toml
from shardwise.cluster.pairs import neighbours
from shardwise.cluster.probe import Probe
from shardwise.cluster.probed import cluster_of
from shardwise.probing.measure import probe_rank
from shardwise.torch_private import TCPStore
from tests.probing.namespaces import MEGABIT, Fabric

NEAR, FAR, SLOW = 200 * MEGABIT, 50 * MEGABIT, 5 * MEGABIT


def shaped_rates(count: int, size: int) -> np.ndarray:
    label = np.arange(count) // size
    rates = np.where(label[:, None] == label[None, :], NEAR, FAR)
    rates[1, count - 1] = SLOW
    return rates


def join(rank: int, size: int, address: str) -> None:
    """Join the ranks of all namespaces, at the first of them."""
    torch.set_num_threads(1)
    store = TCPStore(address, 29555, size, is_master=rank == 0, timeout=timedelta(minutes=5))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def measured(rank: int, size: int, address: str, subjects: tuple[str, ...]) -> Probe | None:
    join(rank, size, address)
    return probe_rank(subjects)


def main(count: int, size: int, subjects: tuple[str, ...]) -> dict[str, Any]:
    rates = shaped_rates(count, size)
    with Fabric(rates.tolist()) as fabric:
        found: Probe = fabric.run(measured, count, fabric.address(0), subjects)[0]
    assert found.pairs is not None, "links were asked for"
    away = ~np.eye(count, dtype=bool)
    told = {
        "seconds": found.seconds,
        "hosts": len(found.hosts),
        "errors": (found.pairs.rates() / rates - 1)[away].tolist(),
        "neighbours": neighbours(found.pairs),
        "slow": [(each.sender, each.receiver) for each in found.slow_links()],
        "curves": sorted({(curve.scope, curve.num_devices) for curve in found.curves}),
    }
    if "devices" in subjects:
        cluster = cluster_of(found)
        assert from_toml(to_toml(cluster)) == cluster
        told["cluster"], told["domain"] = str(cluster), cluster.pools[0].domain
    return told


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:]) or ("links",))))
