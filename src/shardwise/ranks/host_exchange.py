"""Sums and gathers between GPUs that only gloo connects: over the host.

gloo sums to shards and gathers numbers of the host alone. So each rank copies its own there, and what comes of them
back. That is slow, and it is how several ranks can share one GPU, which NCCL refuses.
"""

import torch
from torch import Tensor

from shardwise.ranks.backend_exchange import BackendExchange
from shardwise.ranks.collectives import Group
from shardwise.ranks.cpu_exchange import CpuExchange
from shardwise.ranks.exchange import Exchange, Then
from shardwise.ranks.faults import Watch
from shardwise.ranks.links import is_on_nccl


class HostExchange(BackendExchange):
    """As of a backend: results are taken in the order in which they were asked for."""

    def __init__(self, watch: Watch | None = None) -> None:
        super().__init__()
        self._direct = CpuExchange(watch)

    def settle(self) -> None:
        super().settle()
        self._direct.settle()

    def close(self) -> None:
        super().close()
        self._direct.close()

    def _start_shards(self, flat: Tensor, group: Group, channel: int) -> Then:
        host, size, rank = flat.cpu(), group.size, group.rank
        ticket = self._direct.sum_to_shards(host, _uncounted(group), channel)

        def wait() -> None:
            ticket.wait()
            flat.view(size, -1)[rank].copy_(host.view(size, -1)[rank])

        return wait

    def _start_all(self, flat: Tensor, group: Group, channel: int) -> Then:
        host = flat.cpu()
        ticket = self._direct.sum_to_all(host, _uncounted(group), channel)

        def wait() -> None:
            ticket.wait()
            flat.copy_(host)

        return wait

    def _start_gather(self, flat: Tensor, shard: Tensor, group: Group, channel: int) -> Then:
        host = torch.empty(flat.shape, dtype=flat.dtype)
        ticket = self._direct.gather(host, shard.cpu(), _uncounted(group), channel)

        def wait() -> None:
            ticket.wait()
            flat.copy_(host)

        return wait


def _uncounted(group: Group) -> Group:
    """The same ranks, whose traffic has been counted already."""
    return Group(group.handle)


def make_exchange(device: torch.device, watch: Watch | None) -> Exchange:
    """What moves numbers between replicas that compute on such a device."""
    if device.type == "cpu":
        return CpuExchange(watch)
    return BackendExchange() if is_on_nccl(device) else HostExchange(watch)
