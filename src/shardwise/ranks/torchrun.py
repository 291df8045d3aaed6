"""A process that `torchrun` has started joins the others.

`torchrun` keeps one store for all attempts at a run, and ranks write there where they listen. One that comes back after
a failure could read where another one was before; so every attempt has names of its own in the store.
"""

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise import environment
from shardwise.ranks.worker import choose_backend
from shardwise.torch_private import PrefixStore


def join_if_launched() -> None:
    """Under `torchrun`, start `torch.distributed` if the script has not."""
    place = environment.place_under_torchrun()
    if place is None or not dist.is_available() or dist.is_initialized():
        return
    environment.keep_streams_apart()
    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group(
        choose_backend(*place),
        store=PrefixStore(f"attempt {environment.num_restarts()}", store),
        rank=rank,
        world_size=size,
    )
