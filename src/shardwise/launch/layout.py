"""How many machines, and devices on each: from the plan, and from options."""

from dataclasses import dataclass

from shardwise.cluster.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.launch.work import Work
from shardwise.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """This many nodes with this many devices each: one rank per device, numbered node by node."""

    num_nodes: int
    devices_per_node: int
    has_gpus: bool

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        device = "GPU" if self.has_gpus else "process"
        many = f"{self.devices_per_node} {device}" + (
            "" if self.devices_per_node == 1 else "s" if self.has_gpus else "es"
        )
        return f"{counted(self.num_nodes, 'node')} x {many}"


def lay_out(
    work: Work, *, num_nodes: int | None, devices_per_node: int | None, cluster: Cluster | None, has_gpus: bool
) -> Layout:
    """Return the requested layout. A plan must have exactly as many ranks as there are devices."""
    for option, count in (("--nodes", num_nodes), ("--devices-per-node", devices_per_node)):
        if count is not None and count < 1:
            raise ShardwiseError(f"{option} {count}: it must be at least 1", remedy=f"{option} 1")
    if cluster is not None:
        if len(cluster.pools) > 1:
            raise ShardwiseError(
                f"{cluster} has nodes that differ, and a job can only request equal ones",
                remedy=f"--cluster {cluster.pools[0]}",
            )
        pool = cluster.pools[0]
        devices_per_node = devices_per_node or pool.node.devices_per_node
        num_nodes = num_nodes or (pool.num_nodes if work.plan is None else None)
        has_gpus = pool.device.architecture != "cpu"
    num_ranks = None if work.plan is None else work.plan.num_ranks
    if num_ranks is None and devices_per_node is None:
        raise ShardwiseError(
            "the number of devices per node is not given",
            remedy="--devices-per-node 8, --cluster 2x8xh100, or a --plan",
        )
    nodes, devices = _complete(num_ranks, num_nodes, devices_per_node)
    layout = Layout(num_nodes=nodes, devices_per_node=devices, has_gpus=has_gpus)
    if num_ranks is not None and num_ranks != layout.num_ranks:
        raise ShardwiseError(
            f"the plan {work.plan} is for {counted(num_ranks, 'device')}, and {layout} are {layout.num_ranks}",
            remedy=_remedy(num_ranks, devices),
        )
    if cluster is not None and layout.num_ranks > cluster.num_devices:
        raise ShardwiseError(
            f"{layout} are {layout.num_ranks} devices, and {cluster} has {cluster.num_devices}",
            remedy=f"a plan for {cluster.num_devices} devices: shardwise plan MODEL {cluster} --save plan.toml",
        )
    if work.kind == "serve" and nodes > 1:
        raise ShardwiseError(
            f"serve runs on one node, and {layout} are requested",
            remedy=f"a plan of at most {devices} ranks; --replicas on Kubernetes serves more requests",
        )
    return layout


def notes_on(work: Work, layout: Layout) -> list[str]:
    """Return notes on a plan with this layout: groups that communicate most and cross nodes."""
    plan, devices = work.plan, layout.devices_per_node
    if plan is None or layout.num_nodes == 1:
        return []
    notes = []
    if plan.tp > 1 and (plan.tp > devices or devices % plan.tp):
        notes.append(f"tensor groups of {plan.tp} ranks cross nodes of {counted(devices, 'device')}")
    return notes


def _complete(num_ranks: int | None, nodes: int | None, devices: int | None) -> tuple[int, int]:
    """Return nodes and devices from whichever was given; rounded up if the ranks do not divide, to be refused later."""
    if num_ranks is not None and nodes is None:
        nodes = -(-num_ranks // devices) if devices else 1
    if num_ranks is not None and devices is None:
        devices = -(-num_ranks // (nodes or 1))
    assert devices is not None, "a plan or an option has said it"
    return nodes or 1, devices


def _remedy(num_ranks: int, devices: int) -> str:
    if num_ranks % devices == 0:
        return f"--nodes {num_ranks // devices} --devices-per-node {devices}"
    fitting = max(each for each in range(1, devices + 1) if num_ranks % each == 0)
    return f"--nodes {num_ranks // fitting} --devices-per-node {fitting}"
