"""Sums and gathers of GPUs: by the groups' own collectives, which run in streams of their own, or over the host."""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.ranks.collectives import Group, all_gather_single, others_bytes, reduce_scatter_single
from shardwise.ranks.cpu_exchange import CpuExchange
from shardwise.ranks.exchange import Done, Exchange, Then, Ticket
from shardwise.ranks.faults import Watch

#: The number of sums in progress at which the oldest is waited for: each holds its memory until then.
_MOST_UNDER_WAY = 2


class BackendExchange:
    """Collectives of the backend. Results must be taken in the order of the requests."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._queue: deque[_Turn] = deque()
        self._watch = watch

    def sum_to_shards(
        self,
        flat: Tensor,
        group: Group,
        channel: int,
        then: Then | None = None,
    ) -> Ticket:
        if group.size == 1:
            return self._behind(lambda: None, then)
        group.traffic.note("reduce_scatter", others_bytes(flat, group))
        return self._behind(self._start_shards(flat, group, channel), then)

    def sum_to_all(
        self,
        flat: Tensor,
        group: Group,
        channel: int,
        *,
        follows: bool = False,
    ) -> Ticket:
        if group.size == 1:
            return self._behind(lambda: None, None)
        group.traffic.note("all_reduce", 2 * others_bytes(flat, group))
        if follows:
            self._finish(len(self._queue))
        return self._behind(self._start_all(flat, group, channel), None)

    def gather(
        self,
        flat: Tensor,
        shard: Tensor,
        group: Group,
        channel: int,
        *,
        lends: bool = False,  # noqa: ARG002 - what is sent has left when all has arrived
    ) -> Ticket:
        if group.size == 1:
            if shard.data_ptr() != flat.data_ptr():
                flat.copy_(shard)
            return Done()
        group.traffic.note("all_gather", others_bytes(flat, group))
        return _Turn(self._start_gather(flat, shard, group, channel), None)

    def settle(self) -> None:
        self._finish(len(self._queue))

    def close(self) -> None:
        self._queue.clear()

    # A backend matches collectives by their order, and needs no channels.

    def _start_shards(self, flat: Tensor, group: Group, channel: int) -> Then:  # noqa: ARG002
        own = flat.view(group.size, -1)[group.rank]
        return self._started(lambda handle: reduce_scatter_single(own, flat, group=handle, async_op=True), group)

    def _start_all(self, flat: Tensor, group: Group, channel: int) -> Then:  # noqa: ARG002
        return self._started(lambda handle: handle.allreduce([flat]), group)

    def _start_gather(self, flat: Tensor, shard: Tensor, group: Group, channel: int) -> Then:  # noqa: ARG002
        return self._started(lambda handle: all_gather_single(flat, shard, group=handle, async_op=True), group)

    def _started(self, start: Callable[[dist.ProcessGroup], dist.Work | None], group: Group) -> Then:
        assert group.handle is not None, "one rank alone sends nothing"
        work = start(group.handle)
        assert work is not None, "a rank that is not of the group has no work there"

        def wait() -> None:
            work.wait()
            if self._watch is not None:  # From here on the device waits, and soon the host for the device.
                self._watch.mark()

        return wait

    def _behind(self, wait: Then, then: Then | None) -> Ticket:
        turn = _Turn(wait, then)
        self._queue.append(turn)
        self._finish(len(self._queue) - _MOST_UNDER_WAY)
        return _Until(self, turn)

    def _finish(self, count: int) -> None:
        for _ in range(count):
            self._queue.popleft().wait()

    def finish_until(self, turn: "_Turn") -> None:
        while turn in self._queue:
            self._queue.popleft().wait()


class _Turn:
    def __init__(self, wait: Then, then: Then | None) -> None:
        self._wait, self._then = wait, then

    def wait(self) -> None:
        self._wait()
        if self._then is not None:
            self._then()
            self._then = None


class _Until:
    def __init__(self, exchange: BackendExchange, turn: _Turn) -> None:
        self._exchange, self._turn = exchange, turn

    def wait(self) -> None:
        self._exchange.finish_until(self._turn)


class HostExchange(BackendExchange):
    """Collectives between GPUs that only gloo connects: over the host. Results must be taken in order.

    gloo reduce-scatters and gathers host tensors only. So each rank copies its own there, and the result back. That is
    slow, but it lets several ranks share one GPU, which NCCL refuses.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        super().__init__()
        self._on_host = CpuExchange(watch)

    def settle(self) -> None:
        super().settle()
        self._on_host.settle()

    def close(self) -> None:
        super().close()
        self._on_host.close()

    def _start_shards(self, flat: Tensor, group: Group, channel: int) -> Then:
        host = flat.cpu()
        ticket = self._on_host.sum_to_shards(host, _uncounted(group), channel)
        return _copied(ticket, *(each.view(group.size, -1)[group.rank] for each in (host, flat)))

    def _start_all(self, flat: Tensor, group: Group, channel: int) -> Then:
        host = flat.cpu()
        return _copied(self._on_host.sum_to_all(host, _uncounted(group), channel), host, flat)

    def _start_gather(self, flat: Tensor, shard: Tensor, group: Group, channel: int) -> Then:
        host = torch.empty(flat.shape, dtype=flat.dtype)
        return _copied(self._on_host.gather(host, shard.cpu(), _uncounted(group), channel), host, flat)


def _copied(ticket: Ticket, host: Tensor, device: Tensor) -> Then:
    """Return a function that waits for a host tensor, and copies it to the device."""

    def wait() -> None:
        ticket.wait()
        device.copy_(host)

    return wait


def _uncounted(group: Group) -> Group:
    """Return a group of the same ranks, whose traffic has been counted already."""
    return Group(group.handle)


def make_exchange(device: torch.device, watch: Watch | None, *, on_nccl: bool) -> Exchange:
    """Return the exchange between replicas that compute on this device."""
    if on_nccl:
        return BackendExchange(watch)
    return CpuExchange(watch) if device.type == "cpu" else HostExchange(watch)
