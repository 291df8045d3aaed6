"""The one command that starts the ranks of a node: torch's own launcher, with every node numbered.

Nodes are numbered by whoever starts them, so a rank is where the plan has it: `torchrun`'s own meeting would sort nodes
by their names. It starts nothing again by itself; whoever started it does, on all nodes at once.
"""

import shlex

from shardwise.launch.layout import Layout
from shardwise.launch.work import Work

#: How long `torchrun` waits, when it is told to end, for ranks that save; by itself 30 s, and then it kills them.
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def torchrun_options(layout: Layout, *, address: str, port: str | int, num_nodes: str | None = None) -> str:
    """Its options but for the node's number, for a shell: `address`, `port` and `num_nodes` may be variables of it."""
    return (
        f"--nnodes {num_nodes or layout.num_nodes} --nproc-per-node {layout.devices_per_node}"
        f" --master-addr {address} --master-port {port}"
    )


def torchrun_module(work: Work) -> str:
    """`torchrun` as a module: when it is started again, forked from the process on standby, if the run has one."""
    return f"-m shardwise.standby --folder {shlex.quote(str(work.folder))} torch.distributed.run"


def module_words(work: Work) -> str:
    """What every rank runs, and a server by itself: it starts its ranks, on one node."""
    return f"-m shardwise {work.kind} {shlex.join(work.words)}"
