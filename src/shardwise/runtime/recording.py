"""What an executor did, as a trace in the simulator's format."""

from collections.abc import Iterable
from typing import NamedTuple

from shardwise.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind, text_of
from shardwise.schedule.prices import activations
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import LANES
from shardwise.trace.events import Event, Trace

# What is over as soon as it is issued, like a receive, says nothing. All stages of a rank step at once, at the end.
_SHOWN = (COMPUTE | SENDS) - {Kind.STEP}


class Note(NamedTuple):
    """That an instruction was run: its place in the rank's list, and from when to when."""

    position: int
    start: float
    end: float


class Recording:
    """Notes what is run. During the step that is an append for each instruction; the rest is done at its end."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._noted: list[tuple[int, Instruction, float, float]] = []

    def note(self, rank: int, instruction: Instruction, start: float, end: float) -> None:
        """Note that a rank ran an instruction, from when to when, in seconds of any clock that all ranks share."""
        self._noted.append((rank, instruction, start, end))

    def note_step(self, rank: int, start: float, end: float) -> None:
        """Note that all stages of a rank have stepped."""
        step = next(each for each in reversed(self._schedule.orders[rank]) if each.kind is Kind.STEP)
        self._noted = [each for each in self._noted if each[0] != rank or each[1].kind in _SHOWN]
        self._noted.append((rank, step, start, end))

    def notes_of(self, rank: int) -> list[Note]:
        """What a rank did, in a form that can be told to another which has the same schedule."""
        positions = {instruction: position for position, instruction in enumerate(self._schedule.orders[rank])}
        return [Note(positions[each], start, end) for who, each, start, end in self._noted if who == rank]

    def clear(self) -> None:
        """Forget what was noted."""
        self._noted = []

    def add(self, rank: int, notes: Iterable[Note]) -> None:
        """Take in what another process told of a rank."""
        order = self._schedule.orders[rank]
        self._noted += [(rank, order[note.position], note.start, note.end) for note in notes]

    def trace(self) -> Trace:
        """What was noted, from 0 seconds on. What ranks hold is counted in microbatch-stages, as in a simulation."""
        zero = min((start for _, _, start, _ in self._noted), default=0.0)
        held = activations(self._schedule.placement)
        events = []
        for rank, instruction, start, end in self._noted:
            at_start, at_end = held(instruction)
            events.append(
                Event(
                    name=text_of(instruction),
                    rank=rank,
                    lane=LANES[instruction.kind],
                    start=start - zero,
                    end=end - zero,
                    stage=instruction.stage,
                    microbatch=instruction.microbatch,
                    held_at_start=at_start,
                    held_at_end=at_end,
                    peer=self._find_peer(instruction),
                )
            )
        return Trace(name=self._schedule.name, num_ranks=self._schedule.num_ranks, events=tuple(events))

    def _find_peer(self, instruction: Instruction) -> int | None:
        if instruction.peer is None or instruction.kind not in SENDS | RECEIVES:
            return None
        return self._schedule.placement.ranks[instruction.peer]
