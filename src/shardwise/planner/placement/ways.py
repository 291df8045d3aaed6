"""The links between devices, as a placement sees them: seconds per byte, and which devices are near each other."""

from dataclasses import dataclass

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.pairs import levels
from shardwise.cost.numbers import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Devices by number. `domain` is the group of nearest devices of each; `matrix` has measured seconds per byte.

    Without measurements, a byte takes `inside` within a domain and `across` between two, for each device.
    """

    domain: Ints
    inside: Floats
    across: Floats
    matrix: Floats | None = None

    @property
    def num_devices(self) -> int:
        return len(self.domain)

    def seconds(self, senders: Ints, receivers: Ints) -> Floats:
        """Return the seconds per byte between two devices, in the slower of both directions."""
        if self.matrix is not None:
            return np.asarray(self.matrix[senders, receivers])
        near = self.domain[senders] == self.domain[receivers]
        inside = np.maximum(self.inside[senders], self.inside[receivers])
        return np.where(near, inside, np.maximum(self.across[senders], self.across[receivers]))


def ways_of(cluster: Cluster) -> Ways:
    """Return the measured links of a cluster, or those of its pools' data sheets."""
    count = cluster.num_devices
    domain, inside, across = np.zeros(count, dtype=np.int64), np.zeros(count), np.zeros(count)
    begin, number = 0, 0
    for pool in cluster.pools:
        mine = slice(begin, begin + pool.num_devices)
        domain[mine] = number + np.arange(pool.num_devices) // pool.domain
        inside[mine] = 1 / pool.node.link.bytes_per_second
        across[mine] = 1 / pool.node.fabric.bytes_per_second
        begin, number = begin + pool.num_devices, int(domain[mine][-1]) + 1
    if cluster.pairs is None:
        return Ways(domain=domain, inside=inside, across=across)
    rates = cluster.pairs.rates()
    matrix = 1 / np.maximum(np.minimum(rates, rates.T), 1e-9)
    np.fill_diagonal(matrix, 0.0)
    for label, group in enumerate(levels(cluster.pairs)[0]):
        domain[list(group)] = label
    return Ways(domain=domain, inside=inside, across=across, matrix=matrix)
