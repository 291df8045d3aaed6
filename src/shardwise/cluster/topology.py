"""How devices are connected: links inside a node, one network between nodes, and the hosts."""

from dataclasses import dataclass, replace

from shardwise.cluster.curve import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between devices of one domain: bytes/s of each device, one way, and seconds of one collective step.

    `in_switch`: the switch can reduce (NVLS). `is_shared`: the devices share one bus instead of having a link each.
    `is_measured`: the rate is the one that messages reach, not the data sheet's.
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

    `oversubscription` is the bandwidth of the nodes relative to that of the network's upper levels. With `rails`,
    devices with the same position in their nodes share one switch, and traffic between them stays below it.
    `is_measured`: the rate is the one that messages reach.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float
    oversubscription: float = 1.0
    rails: bool = True
    is_measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host of a node's devices: its RAM, the link to each device, its cores and its disk.

    `devices_on_link` devices share one link to the host.
    """

    memory_bytes: int
    device_bytes_per_second: float
    num_cores: int
    disk_bytes_per_second: float = 3e9
    devices_on_link: int = 1
    memory_bytes_per_second: float = 500e9


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """A kind of node. `domain` is the number of devices that one link connects: a node's, or a rack's (NVL72).

    `curves` are collectives measured inside a domain.
    """

    devices_per_node: int
    link: Link
    domain: int
    fabric: Fabric
    host: Host
    curves: tuple[Curve, ...] = ()

    def resized(self, devices: int) -> "NodeKind":
        """Return the same node with `devices` devices. A node's domain is resized with it; a rack's domain is not."""
        is_rack = self.domain > self.devices_per_node
        return replace(self, devices_per_node=devices, domain=self.domain if is_rack else devices)
