"""The command that starts the ranks of a node: `torchrun`, with an explicit number for every node.

The launcher numbers the nodes, so that each rank is where the plan puts it: `torchrun`'s own rendezvous would sort them
by name. `torchrun` restarts nothing; the launcher restarts all nodes at once.
"""

import shlex

from shardwise.launch.layout import Layout
from shardwise.launch.work import Work

#: How long `torchrun` waits for ranks that save when it is told to end; by default it kills them after 30 s.
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def torchrun_options(layout: Layout, *, address: str, port: str | int, num_nodes: str | None = None) -> str:
    """Return its options but the node's number, for a shell; `address`, `port`, `num_nodes` may be its variables."""
    return (
        f"--nnodes {num_nodes or layout.num_nodes} --nproc-per-node {layout.devices_per_node}"
        f" --master-addr {address} --master-port {port}"
    )


def torchrun_module(work: Work) -> str:
    """Return `torchrun` as a module; on a restart it forks from the standby process, if the run has one."""
    return f"-m shardwise.standby --folder {shlex.quote(str(work.folder))} torch.distributed.run"


def module_words(work: Work) -> str:
    """Return what every rank runs; a server runs it once and starts its own ranks, on one node."""
    return f"-m shardwise {work.kind} {shlex.join(work.words)}"
