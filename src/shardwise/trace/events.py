"""One event format for what the simulator predicts and for what the runtime measures."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Lane(StrEnum):
    """What an event occupies on its rank."""

    COMPUTE = "compute"
    STEP = "step"
    SEND = "send"
    RECEIVE = "receive"
    COLLECTIVE = "collective"
    OFFLOAD = "offload"
    RELOAD = "reload"


class Event(NamedTuple):
    """Something that took place on a rank. A named tuple, because a trace may hold millions.

    `held_at_start` and `held_at_end` are what the rank holds more (or, negative, less) from its start and from its end
    on, in the unit of the trace. `after` is the index of the event whose end let this one start: following it
    backwards gives the critical path. `peer` is the other rank of a send or a receive.
    """

    name: str
    rank: int
    lane: Lane
    start: float
    end: float
    stage: int
    microbatch: int
    held_at_start: float = 0.0
    held_at_end: float = 0.0
    after: int | None = None
    peer: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Events of all ranks. Indices into `events` are what `Event.after` means."""

    name: str
    num_ranks: int
    events: tuple[Event, ...]

    @cached_property
    def compute(self) -> tuple[tuple[Event, ...], ...]:
        """For each rank, its forwards and backwards in the order in which they ran."""
        ranks: list[list[Event]] = [[] for _ in range(self.num_ranks)]
        for event in self.events:
            if event.lane is Lane.COMPUTE:
                ranks[event.rank].append(event)
        return tuple(tuple(sorted(events, key=lambda event: event.start)) for events in ranks)

    @cached_property
    def makespan(self) -> float:
        """From the start of the first event to the end of the last."""
        if not self.events:
            return 0.0
        return max(event.end for event in self.events) - self.start

    @cached_property
    def start(self) -> float:
        return min((event.start for event in self.events if event.lane is not Lane.RECEIVE), default=0.0)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """For each rank, from the start of its first forward to the end of its last backward."""
        return tuple(max(event.end for event in events) - events[0].start if events else 0.0 for events in self.compute)

    @property
    def span(self) -> float:
        """The longest of the ranks' spans: what a step costs when the next one may begin where this one has ended."""
        return max(self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the seconds in which it computes."""
        return tuple(sum(event.end - event.start for event in events) for events in self.compute)

    @property
    def bubble(self) -> float:
        """The part of the span in which not even the busiest rank works."""
        return 1 - max(self.busy) / self.span if self.span > 0 else 0.0
