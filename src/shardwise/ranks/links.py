"""The connections of a pipeline, made once for all of its messages.

Each pipeline has two gloo groups, one for each direction. If ranks compute on GPUs that NCCL connects, there is also
one NCCL group of two for each direction between two ranks that communicate:

    pp=3        ranks 0 -> 1     ranks 1 -> 2     ranks 1 -> 0     ranks 2 -> 1

Every rank of the world makes every group, those of other pipelines too, in one order: `torch.distributed` names groups
by their number, and NCCL splits them off from a larger one together.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from shardwise.ranks.collectives import Group
from shardwise.ranks.faults import Watch
from shardwise.ranks.first_talk import first_talk
from shardwise.torch_private import default_backend

#: From one rank of a pipeline to another.
Link = tuple[int, int]


def is_on_nccl(device: torch.device) -> bool:
    """Whether the default group moves this device's tensors over NCCL."""
    if device.type != "cuda" or not dist.is_initialized():
        return False
    try:
        return bool(default_backend(device).name() == "nccl")
    except RuntimeError:  # There is no backend for the device.
        return False


def make_groups(pipelines: Sequence[Sequence[int]]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make the two groups of every pipeline, given the ranks of each in the world, and return those of this rank's.

    Every rank of the world calls this, with the same pipelines.
    """
    found: list[dist.ProcessGroup] = []
    for ranks in pipelines:
        # Ranks of a group are in the world's order, so those of the pipeline must be too.
        assert list(ranks) == sorted(ranks), f"the ranks {ranks} of a pipeline are not in the order of the world"
        pair = [dist.new_group(list(ranks), backend="gloo") for _ in range(2)]
        if dist.get_rank() in ranks:
            found = pair
    up, down = found
    return up, down


def make_links(
    links: Iterable[Link],
    pipelines: Sequence[Sequence[int]],
    *,
    device: torch.device,
    backend: str = "nccl",
    watch: Watch | None = None,
) -> dict[Link, dist.ProcessGroup]:
    """Make a group of two for each link in every pipeline, and return those of which this rank is an end.

    Every rank of the world calls this, with the same links and pipelines.
    """
    me, found = dist.get_rank(), dict[Link, dist.ProcessGroup]()
    for link in sorted(set(links)):
        for ranks in pipelines:
            ends = [ranks[rank] for rank in link]
            group = dist.new_group(ends, backend=backend)
            if me in ends:
                found[link] = group
    (mine,) = [ranks for ranks in pipelines if me in ranks]

    # NCCL connects two ranks at their first communication, and both wait for that. In a step, two ranks that first
    # send to each other would deadlock. Here all ranks go through their links in one order, so progress is certain.
    def talk(source: int, group: dist.ProcessGroup) -> None:
        number, peer = torch.zeros(1, device=device), 1 - group.rank()
        work = group.send([number], peer, 0) if me == mine[source] else group.recv([number], peer, 0)
        work.wait()

    for (source, _), group in found.items():
        _begin(partial(talk, source, group), group, device, watch)
    return found


def connect(groups: Iterable[Group], device: torch.device, watch: Watch | None = None) -> None:
    """Let NCCL connect groups now. Every rank of the world calls this, with its groups of each kind in one order.

    NCCL connects the ranks of a group at its first collective, and all of them wait for that. In a step, the first rank
    there would wait for others that wait for its next message. Here no rank has anything else to do.
    """
    handles = {id(each.handle): each.handle for each in groups if each.handle is not None and each.size > 1}
    for handle in handles.values():
        _begin(partial(_add_up, handle, device), handle, device, watch)


def _add_up(handle: dist.ProcessGroup, device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device), group=handle)


def _begin(talk: Callable[[], None], group: dist.ProcessGroup, device: torch.device, watch: Watch | None) -> None:
    """Run the first communication of a group; on a CPU that stands in for a GPU it cannot hang."""
    if device.type == "cuda":
        first_talk(talk, group, device, watch)
    else:
        talk()
