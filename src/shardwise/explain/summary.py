"""The numbers of a run that its report shows and its doctor examines, each computed on first access."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.trace.events import Trace
from shardwise.trace.hidden import hidden_of_ranks
from shardwise.trace.memory import peak_by_owner, peaks
from shardwise.trace.run import Run
from shardwise.trace.streams import StreamUse, streams_of_ranks
from shardwise.trace.stretches import BUBBLE, Part, Stretch, parts_of_ranks, stretches


@dataclass(frozen=True)
class Summary:
    """The numbers of a run. Those of each rank are sequences. Times are in seconds."""

    run: Run

    @property
    def trace(self) -> Trace:
        return self.run.trace

    @property
    def step_seconds(self) -> float:
        return self.trace.makespan

    @cached_property
    def cut(self) -> Sequence[Sequence[Stretch]]:
        return stretches(self.trace)

    @cached_property
    def parts(self) -> Sequence[Mapping[Part, float]]:
        return parts_of_ranks(self.trace, self.cut)

    @cached_property
    def hidden(self) -> Sequence[float]:
        """Communication beside work."""
        return hidden_of_ranks(self.trace, self.cut)

    @cached_property
    def streams(self) -> Sequence[Sequence[StreamUse]]:
        """What the streams of each rank's GPU did, where they were seen."""
        return streams_of_ranks(self.trace)

    @cached_property
    def held(self) -> Sequence[Mapping[str, float]]:
        """The bytes of each owner at the rank's fullest moment; nothing where none were measured."""
        return peak_by_owner(self.trace)

    @property
    def peaks(self) -> list[float]:
        """What each rank holds at most: bytes where they were measured, else microbatches of a stage."""
        return [sum(owners.values()) for owners in self.held] if self.trace.holdings else list(peaks(self.trace))

    def mean(self, *parts: Part) -> float:
        """Return the seconds of some parts, averaged over the ranks."""
        return sum(rank[part] for rank in self.parts for part in parts) / self.trace.num_ranks

    @property
    def bubble_seconds(self) -> float:
        return self.mean(*BUBBLE)
