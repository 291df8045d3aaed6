"""The cluster, as a value: pools of equal nodes. It has a short name, as below, and a file format (`file.py`).

8xh100                        one node of eight
64x8xh100                     sixty-four such nodes
2x8xh100+4x8xa100-80g         unequal pools
18x4xgb200                    four to a node, seventy-two in one NVLink domain
2xcpu                         two processes on this computer
"""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.cluster.catalogue import NODES, get_device
from shardwise.cluster.device import Device
from shardwise.cluster.topology import Fabric, Host, Link, NodeKind
from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.cluster.pairs import Pairs

_POOL = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<devices>\d+)x(?P<device>[a-z][\w.-]*|[345]090)", re.IGNORECASE)

# Most kinds of device come in nodes of up to this many, even if fewer are usual (V100 in a DGX-1).
_LARGE_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal nodes with equal devices."""

    device: Device
    num_nodes: int
    node: NodeKind

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.node.devices_per_node

    @property
    def domain(self) -> int:
        """Number of devices of this pool in one domain of fast links."""
        return min(self.node.domain, self.num_devices)

    def __str__(self) -> str:
        usual = NODES.get(self.device.name)
        # A single node that is larger than usual is written as `1x...`, because otherwise it is parsed as several.
        is_large = usual is not None and self.node.devices_per_node > max(usual.devices_per_node, _LARGE_NODE)
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 or is_large else ""
        return f"{nodes}{self.node.devices_per_node}x{self.device.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The hardware: one pool, or several different ones. Ranks number the devices pool by pool, node by node.

    `pairs` are the measured bandwidth and latency between every two devices, or None.
    """

    pools: tuple[Pool, ...]
    pairs: "Pairs | None" = None

    def __post_init__(self) -> None:
        if not self.pools:
            raise ShardwiseError("a cluster without devices", remedy="8xh100")
        for pool in self.pools:
            if pool.num_nodes < 1 or pool.node.devices_per_node < 1:
                raise ShardwiseError(
                    f"{pool.num_nodes} nodes of {pool.node.devices_per_node} {pool.device.name}: both must be above 0",
                    remedy=f"8x{pool.device.name}",
                )

    @staticmethod
    def parse(text: str) -> "Cluster":
        """Read a name like `64x8xh100`; pools are joined with `+`."""
        return Cluster(pools=tuple(_parse_pool(part.strip(), text) for part in text.split("+")))

    def __str__(self) -> str:
        return "+".join(map(str, self.pools))

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    def pool_of(self, rank: int) -> Pool:
        """Return the pool of a rank."""
        for pool in self.pools:
            if rank < pool.num_devices:
                return pool
            rank -= pool.num_devices
        raise ShardwiseError(f"{self} has {self.num_devices} devices, so no rank {rank}", remedy="a smaller rank")


def make_pool(
    device: str,
    *,
    num_nodes: int = 1,
    devices_per_node: int | None = None,
    link: Link | None = None,
    fabric: Fabric | None = None,
    host: Host | None = None,
) -> Pool:
    """Return a pool of a catalogue device in its usual node. Arguments replace parts of the usual node."""
    known = get_device(device)
    usual = NODES[known.name]
    node = usual.resized(devices_per_node or usual.devices_per_node)
    node = replace(node, link=link or usual.link, fabric=fabric or usual.fabric, host=host or usual.host)
    return Pool(device=known, num_nodes=num_nodes, node=node)


def _parse_pool(part: str, text: str) -> Pool:
    match = _POOL.fullmatch(part)
    if match is None:
        raise ShardwiseError(
            f"the cluster {text!r} is not understood at {part!r}: devices, or nodes x devices, x a name",
            remedy="8xh100, 64x8xh100 or 2x8xh100+4x8xa100-80g",
        )
    nodes, devices = int(match["nodes"] or 1), int(match["devices"])
    if nodes < 1 or devices < 1:
        raise ShardwiseError(
            f"the cluster {part!r} has {nodes * devices} devices: it must have at least 1",
            remedy=f"8x{match['device']}",
        )
    if match["nodes"] is None:
        nodes, devices = _in_nodes(match["device"], devices)
    return make_pool(match["device"], num_nodes=nodes, devices_per_node=devices)


def _in_nodes(name: str, devices: int) -> tuple[int, int]:
    """Return the nodes, and devices in each, for a number of devices: 64 H100 are 8 x 8. CPU processes are one node."""
    device = get_device(name)
    usual = NODES[device.name].devices_per_node
    if devices <= max(usual, _LARGE_NODE) or device.architecture == "cpu":
        return 1, devices
    if devices % usual == 0:
        return devices // usual, usual
    size = max(each for each in range(1, usual + 1) if devices % each == 0)
    raise ShardwiseError(
        f"{devices}x{name} is not a whole number of nodes; a node has {usual} devices",
        remedy=f"{devices // size}x{size}x{name} or {-(-devices // usual)}x{usual}x{name}",
    )
