"""One event format for what the simulator predicts and for what the runtime measures."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from shardwise.trace.activities import Activity


class Lane(StrEnum):
    """The resource of its rank that an event occupies."""

    COMPUTE = "compute"
    STEP = "step"
    SEND = "send"
    RECEIVE = "receive"
    COLLECTIVE = "collective"
    OFFLOAD = "offload"
    RELOAD = "reload"
    # Measured only: the rank waits for others; recomputes a forward in its backward; waits for its batch.
    WAIT = "wait"
    RECOMPUTE = "recompute"
    DATA = "data"


class Event(NamedTuple):
    """An event on a rank. A named tuple, because a trace may hold millions.

    `held_at_start` and `held_at_end` are what the rank holds more (or, negative, less) from its start and from its end
    on, in the unit of the trace. `after` is the index of the event whose end let this one start: following it
    backwards gives the critical path. `peer` is the other rank of a send or a receive.

    A predicted receive begins when it is posted, a measured one when the rank begins to stand still for it.
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


class Holding(NamedTuple):
    """A change of the bytes that a rank holds for an owner, from a time on; negative if they are freed."""

    rank: int
    owner: str
    time: float
    num_bytes: float


class Traffic(NamedTuple):
    """What a rank has sent in a step: to one other rank, or (`peer` None) in collectives of a kind."""

    rank: int
    peer: int | None
    kind: str
    num_messages: int
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Events of all ranks. Indices into `events` are what `Event.after` means.

    A measured trace has `windows`: for each rank, when its step began and when it ended. `holdings`, `traffic` and
    `activities`, which are what GPUs did, are there where they were measured.
    """

    name: str
    num_ranks: int
    events: tuple[Event, ...]
    windows: tuple[tuple[float, float], ...] = ()
    holdings: tuple[Holding, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    activities: tuple[Activity, ...] = ()

    @property
    def is_measured(self) -> bool:
        return bool(self.windows)

    @cached_property
    def compute(self) -> tuple[tuple[Event, ...], ...]:
        """The forwards and backwards of each rank in the order in which they ran."""
        ranks: list[list[Event]] = [[] for _ in range(self.num_ranks)]
        for event in self.events:
            if event.lane is Lane.COMPUTE:
                ranks[event.rank].append(event)
        return tuple(tuple(sorted(events, key=lambda event: event.start)) for events in ranks)

    @cached_property
    def activities_of_ranks(self) -> tuple[tuple[Activity, ...], ...]:
        """The activities of each rank's device, in order."""
        ranks: list[list[Activity]] = [[] for _ in range(self.num_ranks)]
        for each in self.activities:
            ranks[each.rank].append(each)
        return tuple(tuple(sorted(mine, key=lambda each: (each.start, each.end))) for mine in ranks)

    @cached_property
    def makespan(self) -> float:
        """The time from the start of the first event to the end of the last; if measured, that of the step."""
        ends = [event.end for event in self.events] + [end for _, end in self.windows]
        return max(ends) - self.start if ends else 0.0

    @cached_property
    def start(self) -> float:
        starts = [event.start for event in self.events if event.lane is not Lane.RECEIVE]
        return min([*starts, *(start for start, _ in self.windows)], default=0.0)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """For each rank, the time from the start of its first forward to the end of its last backward."""
        return tuple(max(event.end for event in events) - events[0].start if events else 0.0 for events in self.compute)

    @property
    def span(self) -> float:
        """The longest of the ranks' spans: the time of a step if the next one may start where this one ended."""
        return max(self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The seconds in which each rank computes."""
        return tuple(sum(event.end - event.start for event in events) for events in self.compute)

    @property
    def bubble(self) -> float:
        """The share of the span in which not even the busiest rank works."""
        return 1 - max(self.busy) / self.span if self.span > 0 else 0.0
