"""Moves values between places: the nearest valid copy, in chunks, on copy streams, as early as it can be.

    cpu:0 or cuda:0         host                disk
      compute               compute
      inward   <----------- (no stream)
      outward  ------------>                 -> inward
               -> others    <------------------ outward

A device takes from the host on its inward stream and sends to the host and to other devices on its outward stream, so
both directions run at once, and what is still to be computed never holds up what is there already. What comes from a
disk or goes there passes through the host; each chunk goes on while the next one arrives.
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
    """Something put into a stream, kept so that it can be put again. `after` are steps of the same list."""

    stream: Stream
    run: Run
    after: tuple[int, ...]
    blame: Blame
    work: Work


class UnfixedError(Exception):
    """The steps of a program are not the same each time: it needs memory that it does not keep."""


class Mover:
    """All places of a machine, and what goes between them."""

    def __init__(self, places: Sequence[Place], routes: Routes, journal: Journal | None, chunk_bytes: int) -> None:
        self.places = places
        self.routes = routes
        self.journal = journal
        self.moved_bytes: dict[Pair, int] = {}
        self.num_transfers = 0
        self.num_changes = 0  # Grows with everything that changes what is where: a program looks whether it was alone.
        self.tape: list[Step] | None = None
        self.chunk_bytes = chunk_bytes
        self._host = next(place for place in places if place.kind is Kind.HOST)
        self._disk = next(place for place in places if place.kind is Kind.DISK)
        #: The journal by which time is reckoned, where it is.
        self.reckoned = journal if journal is not None and journal.is_reckoned else None
        if journal is not None:
            for place in places:
                place.memory.on_wait = journal.host_waited
                if journal.is_reckoned:
                    place.memory.is_over = journal.is_over

    def put(self, stream: Stream, run: Run, after: Sequence[Event], blame: Blame, work: Work) -> Event:
        """Put work into a stream, or on the tape while a program is being recorded."""
        if self.tape is not None:
            event = Event(stream, -1)
            event.note = len(self.tape)
            # Events from before the recording are waited for once, when a replay begins.
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
        """Make a value valid at a place, with as few transfers as that takes: none where it is."""
        found = data.copies[target.index]
        if found is not None and found.valid:
            return found
        source = self._nearest(data, target)
        for copy in data.valid_copies:  # A user's tensor, which is not always the nearest.
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
        """A place's copy of a value, valid or not; others are evicted if there is no room for it."""
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
        """Take a copy's buffer from it. A dirty one is first brought to the host, or from there to the disk."""
        data = copy.owner()
        if data is not None and copy.valid and len(data.valid_copies) == 1:
            copy.held += 1
            try:
                self.fetch(data, self._disk if self.places[copy.place] is self._host else self._host)
            finally:
                copy.held -= 1
        self.drop(copy, evicted=True)

    def drop(self, copy: Copy, *, evicted: bool = False) -> None:
        """Give a copy's buffer back."""
        self.num_changes += 1
        memory = self.places[copy.place].memory
        memory.policy.remove(copy, evicted=evicted)
        data = copy.owner()
        if data is not None:
            data.copies[copy.place] = None
        if copy.storage is not None:
            memory.give_back(copy.storage, copy.num_bytes, copy.busy_until())
            copy.storage = None  # Data can die while a copy of it is being evicted: it is given back once.

    def copy(self, target: Tensor, at: Place, source: Tensor, of: Place, after: Sequence[Event], name: str) -> Event:
        """Copy a tensor into another after some events. Nothing is known or noted of what is in them.

        Whole: chunks are for what passes through several places, and a GPU's queue has room for a thousand entries.
        """
        to, by = (torch.as_strided(each, (each.numel(),), (1,)) for each in (target, source))
        return self._put_copy(name, (of, at), (by, to), after, is_first=True)

    def _transfer(self, data: Data, chain: list[Copy]) -> None:
        """Send a value along a chain of copies, chunk by chunk: while one goes on, the next arrives."""
        pieces = [self._chunks(copy.tensor) for copy in chain]
        # A replay asks before it begins, and a GPU's stream is told at once.
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
            # Chunks follow each other: only the first of them pays the latency.
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
        """A tensor's numbers in the order in which they lie, in pieces."""
        flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
        size = max(1, self.chunk_bytes // tensor.element_size())
        return list(torch.split(flat, size))

    def _nearest(self, data: Data, target: Place) -> Copy:
        """The valid copy from which the value is there first."""
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
    """The copy stream of a transfer; of one that passes through the host, that of its first part."""
    if target.kind is Kind.GPU and source.kind is not Kind.GPU:
        return target.inward  # What goes to a GPU has to be in a stream of a GPU, for its events to mean anything.
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
    # Between GPUs torch makes the current streams of both wait for each other. So that neither holds up anything else,
    # the receiver's is one that has nothing to do.
    sends, idle = ends[0].outward, new_stream(ends[1].device)

    def between_gpus() -> None:
        with torch.cuda.stream(idle), torch.cuda.stream(getattr(sends, "cuda", None)):
            to.copy_(by, non_blocking=True)

    return between_gpus
