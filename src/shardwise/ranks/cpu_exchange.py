"""Sums and gathers between processes on CPUs.

Every rank sends each other rank its piece directly, instead of passing pieces around a ring: as many bytes, but one
hop. While ranks compute, CPU time is what counts: it was about half of that of gloo's own reduce-scatters and
all-gathers (torch 2.13, 2 processes on a busy machine). An all-reduce is as good by gloo, and is left to it. A thread
adds the pieces in the order of the ranks, so the result is bitwise the same whichever rank is late.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.ranks.collectives import Group, others_bytes
from shardwise.ranks.exchange import BufferPool, Done, Then, Ticket
from shardwise.ranks.faults import Watch

# Waits end by being broken: gloo closes every connection of a group when one wait times out.
_FOREVER = timedelta(days=1)
_TAGS_OF_A_CHANNEL = 2**16
_SUM = "a sum of gradients"

Works = Sequence[dist.Work]


class _Job:
    """A sum in steps. Each step yields the transfers to wait for before the next. The thread runs them.

    `peer` is a rank that takes part; None if this rank is alone. `peer_now` returns that of the job that is run.
    """

    def __init__(
        self, steps: Iterator[Works], peer: int | None, watch: Watch | None, peer_now: Callable[[], int | None], *,
        follows: bool,
    ) -> None:  # fmt: skip
        self._steps, self.peer, self._watch, self._peer_now = steps, peer, watch, peer_now
        #: Whether its input is the result of the job before it.
        self.follows = follows
        self._posted: Works = ()
        self._begun = 0.0
        self._done = threading.Event()
        self._error: BaseException | None = None

    def post(self) -> None:
        """Take the first step without waiting."""
        self._begun = perf_counter()
        try:
            self._posted = next(self._steps, ())
        except BaseException as error:
            self._error = error

    def run(self) -> None:
        """Take the other steps, each after the transfers of the one before."""
        try:
            if self._error is None:
                _wait(self._posted)
                for works in self._steps:
                    _wait(works)
        except BaseException as error:
            self._error = error
        finally:
            note = None if self._watch is None else self._watch.note_beside
            if note is not None:
                note(_SUM, self._begun, perf_counter())
            self._done.set()

    def wait(self) -> None:
        if self._watch is None:
            self._done.wait()
        elif not self._done.is_set():
            self._watch.wait_for(self._done, self._where)
        if self._error is not None:
            if self._watch is not None and isinstance(self._error, RuntimeError):
                self._watch.explain(self._error, self.peer)
            raise self._error

    def _where(self) -> tuple[str, int] | None:
        # A job that stands behind another one waits for the rank that this one waits for.
        peer = self._peer_now()
        peer = self.peer if peer is None else peer
        return None if peer is None else (_SUM, peer)


def _wait(works: Works) -> None:
    for work in works:
        work.wait(_FOREVER)


class CpuExchange:
    """Between processes on CPUs."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch
        self._counts: dict[int, int] = {}
        self._sent: list[dist.Work] = []
        self._pool = BufferPool()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: The job that the thread runs.
        self._running: _Job | None = None

    def sum_to_shards(self, flat: Tensor, group: Group, channel: int, then: Then | None = None) -> Ticket:
        if group.size == 1:
            return self._behind(then)
        group.traffic.note("reduce_scatter", others_bytes(flat, group))
        steps = _sum_pieces(flat, group, self._tag(channel), self._pool)
        return self._start(_and_then(steps, then), group, follows=False)

    def sum_to_all(self, flat: Tensor, group: Group, channel: int, *, follows: bool = False) -> Ticket:
        if group.size == 1:
            return self._behind(None)
        group.traffic.note("all_reduce", 2 * others_bytes(flat, group))
        if follows:
            return self._start(_sum_whole(flat, group, self._tag(channel), self._pool), group, follows=True)
        assert group.handle is not None, "one rank alone sends nothing"
        return _Arrivals([(group.handle.allreduce([flat]), _next_rank(group))], _SUM, self._watch)

    def gather(self, flat: Tensor, shard: Tensor, group: Group, channel: int, *, lends: bool = False) -> Ticket:
        pieces = flat.view(group.size, -1)
        if shard.data_ptr() != pieces[group.rank].data_ptr():
            pieces[group.rank].copy_(shard)
        if group.size == 1:
            return Done()
        group.traffic.note("all_gather", others_bytes(flat, group))
        received, sent = _post_gather(pieces, shard, group, self._tag(channel))
        if lends:
            # A rank that has sent its own has room for this rank's, so this waits only for the network.
            received = [*((work, _next_rank(group)) for work in sent), *received]
        else:
            self._sent += sent
        return _Arrivals(received, "a gather of parameters", self._watch)

    def settle(self) -> None:
        _wait(self._sent)
        self._sent.clear()

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _behind(self, then: Then | None) -> Ticket:
        """Queue a function for a single rank: its input may be the result of an earlier job."""
        if then is None and self._thread is None:
            return Done()
        return self._start(_and_then(iter(()), then), Group(), follows=True)

    def _start(self, steps: Iterator[Works], group: Group, *, follows: bool) -> _Job:
        peer = None if group.handle is None else _next_rank(group)
        job = _Job(steps, peer, self._watch, self._peer_now, follows=follows)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shardwise-replicas", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return job

    def _work(self) -> None:
        """Finish jobs in order, while the data of the next arrives. None after the last one ends the thread."""
        last: _Job | None = None
        has_ended = False
        with torch.no_grad():
            while last is not None or not has_ended:
                job = None
                with suppress(queue.Empty):
                    if not has_ended:
                        job = self._jobs.get(block=last is None)
                        has_ended = job is None
                if job is not None and not job.follows:
                    job.post()
                self._running = last
                if last is not None:
                    last.run()
                if job is not None and job.follows:
                    job.post()
                last = job

    def _peer_now(self) -> int | None:
        running = self._running
        return None if running is None else running.peer

    def _tag(self, channel: int) -> int:
        """Return a new pair of tags: a transfer has the same index in its channel on all ranks."""
        count = self._counts[channel] = self._counts.get(channel, -1) + 1
        return channel * _TAGS_OF_A_CHANNEL + 2 * count % _TAGS_OF_A_CHANNEL


class _Arrivals:
    """Transfers that the main thread waits for once, each with a rank that takes part in it."""

    def __init__(self, works: list[tuple[dist.Work, int]], what: str, watch: Watch | None) -> None:
        self._works, self._what, self._watch = works, what, watch

    def wait(self) -> None:
        while self._works:
            work, peer = self._works.pop()
            if self._watch is None:
                work.wait(_FOREVER)
            else:
                self._watch.wait(work, self._what, peer)


def _next_rank(group: Group) -> int:
    """Return a rank of the world that a late group waits for."""
    assert group.handle is not None, "one rank alone waits for nobody"
    return dist.get_process_group_ranks(group.handle)[(group.rank + 1) % group.size]


def _and_then(steps: Iterator[Works], then: Then | None) -> Iterator[Works]:
    yield from steps
    if then is not None:
        then()


def _sum_pieces(flat: Tensor, group: Group, tag: int, pool: BufferPool) -> Iterator[Works]:
    """Receive every rank's part of this rank's piece, and send this rank's parts of theirs."""
    assert group.handle is not None, "one rank alone sends nothing"
    pieces = flat.view(group.size, -1)
    others = [rank for rank in range(group.size) if rank != group.rank]
    lent = pool.take(len(others) * pieces.shape[1], flat)
    parts = lent.view(len(others), -1)
    received = [group.handle.recv([part], rank, tag) for part, rank in zip(parts, others, strict=True)]
    sent = [group.handle.send([pieces[rank]], rank, tag) for rank in others]
    yield received
    own = pieces[group.rank]
    if len(others) > 1 and own.dtype in (torch.bfloat16, torch.float16):
        own.copy_(torch.stack([own, *parts]).sum(0, dtype=torch.float32))  # Rounded once.
    else:
        for part in parts:
            own += part
    pool.give_back(lent)
    yield sent


def _sum_whole(flat: Tensor, group: Group, tag: int, pool: BufferPool) -> Iterator[Works]:
    """Let every rank sum one piece and send it to all. Small tensors are not cut into pieces."""
    length = -(-flat.numel() // group.size) * group.size
    even = flat if length == flat.numel() and flat.is_contiguous() else flat.new_zeros(length)
    if even is not flat:
        even[: flat.numel()] = flat.reshape(-1)
    yield from _sum_pieces(even, group, tag, pool)
    pieces = even.view(group.size, -1)
    received, sent = _post_gather(pieces, pieces[group.rank], group, tag + 1)
    yield [work for work, _ in received]
    yield sent
    if even is not flat:
        flat.copy_(even[: flat.numel()].view_as(flat))


def _post_gather(
    pieces: Tensor, shard: Tensor, group: Group, tag: int
) -> tuple[list[tuple[dist.Work, int]], list[dist.Work]]:
    assert group.handle is not None, "one rank alone sends nothing"
    ranks = dist.get_process_group_ranks(group.handle)
    others = [rank for rank in range(group.size) if rank != group.rank]
    received = [(group.handle.recv([pieces[rank]], rank, tag), ranks[rank]) for rank in others]
    # Start at different ranks, so that not all send to the same one first.
    sent = [group.handle.send([shard], (group.rank + step) % group.size, tag) for step in range(1, group.size)]
    return received, sent
