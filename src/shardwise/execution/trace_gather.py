"""What every rank noted of a step, told to each other by one clock.

It travels in columns of plain values: thousands of notes one by one would take longer to pack than to note.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shardwise.execution.recording import Note, RankNotes, Recording
from shardwise.trace.events import Holding, Lane, Traffic

_LANES = tuple(Lane)
_NUMBERS = {lane: number for number, lane in enumerate(_LANES)}


def share_notes(
    recording: Recording, mine: RankNotes, *, gather: Callable[[Any], list[Any]], correction: float, num_ranks: int
) -> None:
    """Everybody tells everybody. `gather` gives what each rank of the world gives; `correction` is of this clock."""
    told = gather(packed(mine.by_clock(correction)))
    assert len(told) == num_ranks, f"{len(told)} of {num_ranks} ranks told what they did"
    for rank, each in enumerate(told):
        recording.take(rank, unpacked(each))


def packed(told: RankNotes) -> tuple[Any, ...]:
    """What a rank tells, in plain values."""
    notes = _columns(told.notes, len(Note._fields))
    notes[1] = [_NUMBERS[lane] for lane in notes[1]]
    holdings, traffic = _columns(told.holdings, len(Holding._fields)), _columns(told.traffic, len(Traffic._fields))
    return told.place, told.window, notes, holdings, traffic


def unpacked(given: tuple[Any, ...]) -> RankNotes:
    """What was packed."""
    place, window, notes, holdings, traffic = given
    notes = [notes[0], [_LANES[number] for number in notes[1]], *notes[2:]]
    return RankNotes(
        place,
        window,
        list(map(Note, *notes)),
        list(map(Holding, *holdings)),
        list(map(Traffic, *traffic)),
    )


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]
