"""Moves values between places: the nearest valid copy, in chunks, on copy streams, as early as it can be.

    cpu:0 or cuda:0         host                disk
      compute               compute
      inward   <----------- (no stream)
      outward  ------------>                 -> inward
               -> others    <------------------ outward

A device receives from the host on its inward stream, and sends to the host and to other devices on its outward stream.
So both directions run at once, and pending compute never delays the transfer of data that are ready. Transfers from and
to a disk go through the host; each chunk is forwarded while the next one arrives.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from shardwise.dataflow.cuda import new_stream
from shardwise.dataflow.data import Copy, Data, run_guarded
from shardwise.dataflow.journal import Journal, Work
from shardwise.dataflow.links import Pair, Routes
from shardwise.dataflow.place import Kind, Place
from shardwise.dataflow.streams import Blame, Event, Run, Stream
from shardwise.dataflow.task_errors import blame_copy
from shardwise.errors import ShardwiseError
from shardwise.trace.events import Lane
from shardwise.units import format_bytes

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Step:
    """Work in a stream, recorded so that it can be submitted again. `after` are indices of steps in the same list."""

    stream: Stream
    run: Run
    after: tuple[int, ...]
    blame: Blame
    work: Work


class UnfixedError(Exception):
    """The steps of a program differ between replays: it needs memory that it does not keep."""


class Mover:
    """Moves data between the places of a machine."""

    def __init__(self, places: Sequence[Place], routes: Routes, journal: Journal | None, chunk_bytes: int) -> None:
        self.places = places
        self.routes = routes
        self.journal = journal
        self.moved_bytes: dict[Pair, int] = {}
        self.num_transfers = 0
        self.num_changes = 0  # Incremented by all work and every dropped copy, so that a program can detect either.
        self.tape: list[Step] | None = None
        self.chunk_bytes = chunk_bytes
        self._host = next(place for place in places if place.kind is Kind.HOST)
        self._disk = next(place for place in places if place.kind is Kind.DISK)
        #: The journal that simulates time, where time is simulated.
        self.reckoned = journal if journal is not None and journal.is_reckoned else None
        if journal is not None:
            for place in places:
                place.memory.on_wait = journal.host_waited
                if journal.is_reckoned:
                    place.memory.is_over = journal.is_over

    def put(self, stream: Stream, run: Run, after: Sequence[Event], blame: Blame, work: Work) -> Event:
        """Put work into a stream, or append it to the tape while a program is being recorded."""
        if self.tape is not None:
            event = Event(stream, -1)
            event.note = len(self.tape)
            # Events from before the recording are waited for once, at the start of a replay.
            steps = tuple(each.note for each in after if each.number < 0)
            self.tape.append(Step(stream, run, steps, blame, work))
            return event
        self.num_changes += 1
        if work.num_bytes:
            self._count(work)
        if self.journal is not None:
            return self.journal.put(stream, run, after, blame, work)
        return stream.put(run, after, blame)

    def fetch(self, data: Data, target: Place) -> Copy:
        """Make a value valid at a place. Transfers nothing if it is valid there already."""
        found = data.copies[target.index]
        if found is not None and found.valid:
            return found
        source = self._nearest(data, target)
        for copy in data.valid_copies:  # One may be a user's tensor, which is not always the nearest.
            copy.check_unchanged(data.name)
        chain = [source]
        source.held += 1
        try:
            for _, place in self.routes.hops(self.places[source.place], target):
                copy = self.buffer(data, place)
                copy.held += 1
                chain.append(copy)
            self._transfer(data, chain)
        finally:
            for copy in chain:
                copy.held -= 1
        self.num_transfers += 1
        return chain[-1]

    def buffer(self, data: Data, place: Place) -> Copy:
        """Return the copy of a value at a place, valid or not. Evicts others if there is no room for a new one."""
        copy = data.copies[place.index]
        if copy is not None:
            return copy
        if self.tape is not None:
            raise UnfixedError
        memory = place.memory
        if not memory.can_make_room(data.num_bytes):
            raise self._no_room(data, place)
        for victim in memory.victims(data.num_bytes):
            self.evict(victim)
        storage, events = memory.take(data.num_bytes)
        copy = data.copies[place.index] = Copy(
            weakref.ref(data), place.index, data.num_bytes, data.view(storage), storage
        )
        copy.copied = events
        memory.policy.add(copy)
        return copy

    def evict(self, copy: Copy) -> None:
        """Drop a copy. A dirty copy is first brought to the host, or from the host to the disk."""
        data = copy.owner()
        if data is not None and copy.valid and len(data.valid_copies) == 1:
            copy.held += 1
            try:
                self.fetch(data, self._disk if self.places[copy.place] is self._host else self._host)
            finally:
                copy.held -= 1
        self.drop(copy, evicted=True)

    def drop(self, copy: Copy, *, evicted: bool = False) -> None:
        """Release a copy's buffer."""
        self.num_changes += 1
        memory = self.places[copy.place].memory
        memory.policy.remove(copy, evicted=evicted)
        data = copy.owner()
        if data is not None:
            data.copies[copy.place] = None
        if copy.storage is not None:
            memory.give_back(copy.storage, copy.num_bytes, copy.busy_until())
            copy.storage = None  # Data can be collected while a copy of it is being evicted: release the buffer once.

    def copy(self, target: Tensor, at: Place, source: Tensor, of: Place, after: Sequence[Event], name: str) -> Event:
        """Copy a tensor into another after some events. The tensors are not tracked as data.

        The copy is not split: chunks only help on routes with several hops, and a GPU's queue has room for about a
        thousand entries.
        """
        to, by = (torch.as_strided(each, (each.numel(),), (1,)) for each in (target, source))
        return self._put_copy(name, (of, at), (by, to), after, is_first=True)

    def _transfer(self, data: Data, chain: list[Copy]) -> None:
        """Send a value along a chain of copies, chunk by chunk: each chunk is forwarded while the next one arrives."""
        pieces = [self._chunks(copy.tensor) for copy in chain]
        # A replay checks before it begins, and a copy on a GPU's stream is issued at once.
        guard = chain[0].guard(data.name) if self.tape is None else None
        events: list[Event] = []
        for number in range(len(pieces[0])):
            arrived: list[Event] = []
            for hop, (source, target) in enumerate(pairwise(chain)):
                after = [arrived[-1]] if arrived else []
                if number == 0:
                    after += target.busy_until()
                    if hop == 0 and source.writer is not None:
                        after.append(source.writer)
                ends = (self.places[source.place], self.places[target.place])
                tensors = (pieces[hop][number], pieces[hop + 1][number])
                asks = guard if hop == 0 else None
                arrived.append(self._put_copy(data.name, ends, tensors, after, is_first=number == 0, guard=asks))
            events = arrived
        for event, (source, target) in zip(events, pairwise(chain), strict=True):
            target.written(event)
            source.add_copied(event)

    def _put_copy(
        self,
        name: str,
        ends: tuple[Place, Place],
        tensors: tuple[Tensor, Tensor],
        after: Sequence[Event],
        *,
        is_first: bool,
        guard: Run | None = None,
    ) -> Event:
        (source, target), (by, to) = ends, tensors
        stream = _stream_for(source, target)
        num_bytes = by.numel() * by.element_size()
        link = self.routes.links.get((source.index, target.index))
        seconds = 0.0
        if link is not None:
            # Chunks are pipelined: only the first pays the latency.
            seconds = num_bytes / link.bytes_per_second + (link.latency_seconds if is_first else 0.0)
        lane = _lane(source, target)
        place, peer = (target, source) if lane is Lane.RELOAD else (source, target)
        work = Work(name=name, lane=lane, place=place.index, peer=peer.index, num_bytes=num_bytes, seconds=seconds)
        if self.tape is not None:
            work.fits_graph = lane is not Lane.SEND and all(each.is_cuda or each.is_pinned() for each in tensors)
        others = [each for each in after if each.stream is not stream or self.tape is not None]
        run: Run = _copying(to, by, ends)
        if guard is not None:
            run = partial(run_guarded, run, [guard])
        return self.put(stream, run, others, partial(blame_copy, name, source.name, target.name), work)

    def _chunks(self, tensor: Tensor) -> list[Tensor]:
        """Split a tensor's elements, in memory order, into chunks."""
        flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
        size = max(1, self.chunk_bytes // tensor.element_size())
        return list(torch.split(flat, size))

    def _nearest(self, data: Data, target: Place) -> Copy:
        """Return the valid copy from which the value would arrive first."""
        valid = data.valid_copies
        if not valid:
            raise ShardwiseError(
                f"{data.name} is read but has no value yet: no task has written it",
                remedy=f"{data.name}.set(tensor), or a task with writes=[{data.name}] before",
            )
        return min(valid, key=lambda copy: self._arrival_seconds(copy, target))

    def _arrival_seconds(self, copy: Copy, target: Place) -> float:
        ready = 0.0
        if self.reckoned is not None:
            ready = copy.writer.end_seconds if copy.writer is not None else 0.0
            ready = max(ready, _stream_for(self.places[copy.place], target).tail_seconds)
        return ready + self.routes.seconds(self.places[copy.place], target, copy.num_bytes)

    def _count(self, work: Work) -> None:
        assert work.peer is not None, "what moves bytes has two ends"
        pair = (work.peer, work.place) if work.lane is Lane.RELOAD else (work.place, work.peer)
        self.moved_bytes[pair] = self.moved_bytes.get(pair, 0) + work.num_bytes

    def _no_room(self, data: Data, wanted: Place) -> ShardwiseError:
        states = []
        for place in self.places:
            budget = place.memory.budget_bytes
            live = format_bytes(place.memory.live_bytes)
            states.append(f"{place} has {live} in use" + ("" if budget is None else f" of {format_bytes(budget)}"))
        larger = format_bytes((wanted.memory.budget_bytes or 0) + data.num_bytes)
        return ShardwiseError(
            f"no room for {data.name}: {format_bytes(data.num_bytes)} are needed at {wanted}; {', '.join(states)}",
            remedy=f'a larger budget, as in Machine(budget={{"{wanted}": "{larger}"}}), or tasks that use less at once',
        )


def _stream_for(source: Place, target: Place) -> Stream:
    """Return the copy stream of a transfer; for one through the host, that of its first hop."""
    if target.kind is Kind.GPU and source.kind is not Kind.GPU:
        return target.inward  # A copy to a GPU must be in a stream of a GPU, so that its event is a CUDA event.
    return source.outward if source.is_device or source.kind is Kind.DISK else target.inward


def _lane(source: Place, target: Place) -> Lane:
    if source.is_device and target.is_device:
        return Lane.SEND
    if target.is_device or source.kind is Kind.DISK:
        return Lane.RELOAD
    return Lane.OFFLOAD


def _copying(to: Tensor, by: Tensor, ends: tuple[Place, Place]) -> Callable[[], object]:
    if ends[0].kind is not Kind.GPU or ends[1].kind is not Kind.GPU:
        return lambda: to.copy_(by, non_blocking=True)
    # For a copy between GPUs, torch makes the current streams of both wait for each other. To delay nothing else, an
    # idle stream is made current on the receiving GPU.
    sends, idle = ends[0].outward, new_stream(ends[1].device)

    def between_gpus() -> None:
        with torch.cuda.stream(idle), torch.cuda.stream(getattr(sends, "cuda", None)):
            to.copy_(by, non_blocking=True)

    return between_gpus
