"""End waits in process groups from outside, when it is known that they would never complete."""

import contextlib
import threading
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.ranks.shared_memory import Pair
from shardwise.torch_private import find_gpu_backend

_A_MOMENT = timedelta(milliseconds=1)
_TAG_OF_NOTHING = 987_654


def break_all(groups: Iterable[dist.ProcessGroup | Pair], *, again: bool = False) -> None:
    """End every pending wait in these groups, and close their connections. Return at once.

    Aborting an NCCL communicator frees memory, which may wait for the kernels of another communicator. So each is
    aborted in its own thread, all before any is waited for. Once is enough for NCCL: `again` leaves these groups out.
    """
    every = list(groups)
    for group in every:
        if not again and isinstance(group, dist.ProcessGroup) and find_gpu_backend(group) is not None:
            threading.Thread(target=_abort, args=(group,), name="shardwise-abort", daemon=True).start()
    for group in every:
        _break(group)


def _abort(group: dist.ProcessGroup) -> None:
    """Abort a group's communicator: its kernels end, and threads that wait for them continue."""
    backend = find_gpu_backend(group)
    with contextlib.suppress(RuntimeError):
        if backend is not None:
            backend.abort()


def _break(group: dist.ProcessGroup | Pair) -> None:
    """Do the same without NCCL. When a wait times out, gloo closes all connections of the group. So a wait for a
    message that no rank ever sends is made to time out. A group that the script has destroyed has no waits left: torch
    no longer knows its backend (TypeError, ValueError)."""
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        if not isinstance(group, dist.ProcessGroup):
            group.sever()
        elif group.size() > 1 and "gloo" in str(dist.get_backend_config(group)):
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _TAG_OF_NOTHING).wait(_A_MOMENT)
