"""Ranks that share a GPU find each other, so that NCCL can be told what it takes to connect them.

One process cannot know it. Its launcher has numbered the processes that it has started itself, and another launcher on
the same machine others; and the same number on another machine is another GPU. So each rank says which GPU it has (no
two GPUs have the same id) and where it is, and all of them decide the same.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise import environment
from shardwise.ranks.clocks import this_machine
from shardwise.ranks.store_meeting import StoreMeeting
from shardwise.torch_private import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The GPU of a rank by its id, empty if it has none, and the network inside of its machine that it is on."""

    gpu: str
    network: str


def share_if_needed(store: Store, rank: int, num_ranks: int, seat: Seat | None = None) -> None:
    """Prepare NCCL for GPUs that ranks share, if any do. All ranks call it alike, with a `Pulse` that ends the wait for
    one that does not come; without a seat, with the GPU that this process has taken."""
    seats = StoreMeeting(store, "shardwise/seats", rank, num_ranks).exchange(seat or _own_seat(), lambda: None)
    if is_any_shared(seats):
        # All of them, also those that have a GPU of their own: both ends of a connection have to be of one kind.
        environment.share_gpu(rank, is_one_network=len({each.network for each in seats}) == 1)


def is_any_shared(seats: Sequence[Seat]) -> bool:
    gpus = [each.gpu for each in seats if each.gpu]
    return len(set(gpus)) < len(gpus)


def _own_seat() -> Seat:
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else ""
    return Seat(gpu=gpu, network=f"{this_machine()} {network_namespace()}")


def network_namespace() -> int:
    """The number of this process's network inside of its machine, 0 where there is none. A container has one of its
    own, and its loopback reaches no other."""
    with suppress(OSError):
        return Path("/proc/self/ns/net").stat().st_ino
    return 0
