"""Detection of ranks that share a GPU, so that NCCL can be configured to connect them.

A process cannot detect this alone. Its launcher numbers only the processes that it has started, and another launcher on
the same machine numbers its own; the same number on another machine is another GPU. So each rank publishes its GPU's id
(which is unique) and its network, and all ranks come to the same decision.
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
    """The id of a rank's GPU, empty if it has none, and its machine with its network namespace."""

    gpu: str
    network: str


def share_if_needed(store: Store, rank: int, num_ranks: int, seat: Seat | None = None) -> None:
    """Prepare NCCL for shared GPUs, if ranks share any. All ranks call this alike, with a `Pulse` running that ends the
    wait for a lost rank. Without a seat, the current GPU of this process counts."""
    seats = StoreMeeting(store, "shardwise/seats", rank, num_ranks).exchange(seat or _own_seat(), lambda: None)
    if is_any_shared(seats):
        # All ranks, also those with a GPU of their own: both ends of a connection must be of the same kind.
        environment.share_gpu(rank, is_one_network=len({each.network for each in seats}) == 1)


def is_any_shared(seats: Sequence[Seat]) -> bool:
    gpus = [each.gpu for each in seats if each.gpu]
    return len(set(gpus)) < len(gpus)


def _own_seat() -> Seat:
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else ""
    return Seat(gpu=gpu, network=f"{this_machine()} {network_namespace()}")


def network_namespace() -> int:
    """Return the id of this process's network namespace, 0 if there is none. A container has its own, and its loopback
    does not reach other containers."""
    with suppress(OSError):
        return Path("/proc/self/ns/net").stat().st_ino
    return 0
