"""How devices hang together: links inside a node, one network between nodes, and the hosts."""

from dataclasses import dataclass, replace

from shardwise.cluster.curve import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the devices of one domain: bytes/s of each device, one way, and seconds of one step of a collective.

    `in_switch`: the switch can sum (NVLS). `is_shared`: the devices share one bus instead of having a link each.
    `is_measured`: the rate is what messages reach, not a data sheet's.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float
    in_switch: bool = False
    is_shared: bool = False
    is_measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The network between nodes: bytes/s of each device's share of its node's NICs, one way, and seconds of a step.

    `oversubscription` is how much more bandwidth the nodes have than the network's upper levels. With `rails`, the
    devices of one position in their nodes hang on one switch, and traffic between them never goes above it.
    `is_measured`: the rate is what messages reach.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float
    oversubscription: float = 1.0
    rails: bool = True
    is_measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The computer around the devices of a node: its RAM, the way to each device, its cores and its disk.

    So many devices (`devices_on_link`) hang on one way to the host and share it.
    """

    memory_bytes: int
    device_bytes_per_second: float
    num_cores: int
    disk_bytes_per_second: float = 3e9
    devices_on_link: int = 1
    memory_bytes_per_second: float = 500e9


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """The node a device stands in. `domain` is how many devices one link joins: a node's, or a rack's (NVL72).

    `curves` are collectives that were measured inside a domain.
    """

    devices_per_node: int
    link: Link
    domain: int
    fabric: Fabric
    host: Host
    curves: tuple[Curve, ...] = ()

    def resized(self, devices: int) -> "NodeKind":
        """With so many devices. A rack's domain is not cut by how many share a host; a node's domain is the node."""
        is_rack = self.domain > self.devices_per_node
        return replace(self, devices_per_node=devices, domain=self.domain if is_rack else devices)
