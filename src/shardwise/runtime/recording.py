"""What an executor did, as a trace in the simulator's format."""

from shardwise.schedule.instruction import RECEIVES, SENDS, Instruction, text_of
from shardwise.schedule.prices import activations
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import LANES
from shardwise.trace.events import Event, Trace


class Recording:
    """Notes what is run. During the step that is an append for each instruction; the rest is done at its end."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._noted: list[tuple[int, Instruction, float, float]] = []

    def note(self, rank: int, instruction: Instruction, start: float, end: float) -> None:
        """Note that a rank ran an instruction, from when to when, in seconds of any clock that all ranks share."""
        self._noted.append((rank, instruction, start, end))

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
