"""The check of all ranks' programs together: their problems, and counts of what was checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.nccl.circles import circles
from shardwise.nccl.matching import mismatches
from shardwise.nccl.program import ENDS, Kind, Problem, Program
from shardwise.nccl.races import races


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The problems, mismatches between ranks first; and counts of what was checked.

    `communicators` counts those in use, and `streams` those of all ranks together. `most_under_way` is the largest
    number of NCCL operations that a rank has issued and not yet waited for.
    """

    problems: tuple[Problem, ...]
    ranks: int
    communicators: int
    operations: int
    waits: int
    touches: int
    streams: int
    most_under_way: int

    @property
    def is_right(self) -> bool:
        return not self.problems


def prove(programs: Sequence[Program]) -> Proof:
    """Check the programs of all ranks, in the order of the ranks."""
    problems = list(mismatches(programs))
    if not problems:
        # Deadlocks are defined only for operations that match.
        problems += circles(programs)
    for program in programs:
        problems += races(program)
    for program in programs:
        if program.failure is not None and not problems:
            problems.append(_failed(program))
    streams = {(program.rank, each) for program in programs for each in streams_of(program)}
    over_nccl = {
        event.operation.communicator
        for program in programs
        for event in program.issued
        if event.operation is not None and not event.operation.on_host
    }
    return Proof(
        problems=tuple(problems),
        ranks=len(programs),
        communicators=len(over_nccl),
        operations=sum(len(program.issued) for program in programs),
        waits=sum(each.kind in ENDS for program in programs for each in program.events),
        touches=sum(each.kind in (Kind.READ, Kind.WRITE, Kind.FREE) for one in programs for each in one.events),
        streams=len(streams),
        most_under_way=max(map(_most_under_way, programs), default=0),
    )


def streams_of(program: Program) -> set[str]:
    """Return the streams of a rank's device: those of compute and copies, and one for each communicator in use."""
    found = {each.stream for each in program.events if each.kind is not Kind.MAKE}
    for event in program.issued:
        if event.operation is not None and not event.operation.on_host:
            found.add(f"nccl {event.operation.communicator}")
    return found


def _most_under_way(program: Program) -> int:
    under_way: set[int] = set()
    most = 0
    for event in program.events:
        if event.kind is Kind.ISSUE and event.operation is not None and not event.operation.on_host:
            under_way.add(event.number)
            most = max(most, len(under_way))
        elif event.kind in ENDS:
            under_way.discard(event.number)
    return most


def _failed(program: Program) -> Problem:
    last = program.events[-1] if program.events else None
    where = "at once" if last is None else last.where
    return Problem(
        kind="failed",
        ranks=(program.rank,),
        sentence=f"rank {program.rank} did not come to its end, {where}: {program.failure}",
        look=(last.line or last.at) if last is not None else "what it was given",
    )
