"""Report of a machine: a trace of its places, bytes per link, overlap, stalls, and a lower bound on the time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.dataflow.dispatch import Dispatcher
from shardwise.dataflow.journal import Note
from shardwise.errors import ShardwiseError
from shardwise.trace.attribution import Cause, critical_path, idle_by_cause
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.hidden import joined, overlap

_COPIES = frozenset({Lane.SEND, Lane.OFFLOAD, Lane.RELOAD})


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run. The ranks of the trace are places, in the order of `places`."""

    places: tuple[str, ...]
    trace: Trace
    moved_bytes: Mapping[tuple[str, str], int]
    num_transfers: int
    least_seconds: float

    @property
    def makespan_seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return self.trace.makespan

    @property
    def efficiency(self) -> float:
        """The lower bound on the makespan of these tasks and transfers, divided by the actual makespan."""
        return self.least_seconds / self.trace.makespan if self.trace.makespan > 0 else 1.0

    @property
    def total_bytes(self) -> int:
        """Bytes on all links."""
        return sum(self.moved_bytes.values())

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The events that determine the makespan, first to last."""
        return critical_path(self.trace)

    @cached_property
    def overlap(self) -> float:
        """The share of all copy time during which some place computed."""
        computing = joined([(each.start, each.end) for each in self.trace.events if each.lane is Lane.COMPUTE])
        copies = [(each.start, each.end) for each in self.trace.events if each.lane in _COPIES]
        copied = sum(end - start for start, end in copies)
        return overlap(computing, copies) / copied if copied > 0 else 1.0

    @cached_property
    def stalls(self) -> dict[str, dict[Cause, float]]:
        """For each place that computed, its idle seconds by cause."""
        idle = idle_by_cause(self.trace)
        return {name: idle[rank] for rank, name in enumerate(self.places) if self.trace.compute[rank]}


def make_report(machine: Dispatcher, name: str) -> Report:
    """Wait for all work and report everything since the machine was made."""
    journal = machine.mover.journal
    if journal is None:
        raise ShardwiseError("nothing was recorded that a report could show", remedy="Machine(..., trace=True)")
    machine.wait()
    journal.settle()
    names = tuple(machine.place_names)
    events = tuple(_event(note, number, journal.notes) for number, note in enumerate(journal.notes))
    return Report(
        places=names,
        trace=Trace(name=name, num_ranks=len(names), events=events),
        moved_bytes={(names[one], names[other]): size for (one, other), size in machine.mover.moved_bytes.items()},
        num_transfers=machine.mover.num_transfers,
        least_seconds=least_seconds(journal.notes),
    )


def least_seconds(notes: Sequence[Note]) -> float:
    """Return a lower bound on the makespan of the same tasks and transfers, over all orders.

    Work cannot end before the longest chain of its dependencies. For any subset of a stream's work, the end is no
    earlier than the earliest start in it, plus all of its seconds, plus the shortest chain that follows any of it.
    """
    seconds = [note.end - note.start for note in notes]
    heads = [0.0] * len(notes)
    tails = [0.0] * len(notes)
    for number, note in enumerate(notes):
        heads[number] = _least_after(note.waits, notes, heads, seconds)
    for number in reversed(range(len(notes))):
        for each in notes[number].waits:
            tails[each] = max(tails[each], tails[number] + seconds[number])
    least = max((sum(each) for each in zip(heads, seconds, tails, strict=True)), default=0.0)
    for members in _by_stream(range(len(notes)), notes):
        least = max(least, _least_of(members, heads, seconds, tails))
    return least


def _least_of(
    members: Sequence[int], heads: Sequence[float], seconds: Sequence[float], tails: Sequence[float] | None
) -> float:
    """Return the earliest time at which one stream's work can be over, including what follows it.

    All work that cannot start before some moment runs after that moment, one piece at a time.
    """
    least, load, tail = 0.0, 0.0, float("inf")
    for each in sorted(members, key=heads.__getitem__, reverse=True):
        load, tail = load + seconds[each], 0.0 if tails is None else min(tail, tails[each])
        least = max(least, heads[each] + load + tail)
    return least


def _least_after(
    waits: Sequence[int], notes: Sequence[Note], heads: Sequence[float], seconds: Sequence[float]
) -> float:
    groups = _by_stream(waits, notes)
    return max((_least_of(members, heads, seconds, None) for members in groups), default=0.0)


def _by_stream(numbers: Sequence[int], notes: Sequence[Note]) -> list[list[int]]:
    streams: dict[str, list[int]] = {}
    for number in dict.fromkeys(numbers):
        streams.setdefault(notes[number].stream, []).append(number)
    return list(streams.values())


def _event(note: Note, number: int, notes: Sequence[Note]) -> Event:
    work = note.work
    causes = [each for each in (*note.waits, note.before) if each >= 0]
    after = max(causes, key=lambda each: notes[each].end, default=None)
    return Event(
        name=work.name,
        rank=work.place,
        lane=work.lane,
        start=note.start,
        end=note.end,
        stage=work.place,
        microbatch=number,
        after=after,
        peer=work.peer,
    )
