"""What a report reads off a run, computed once: stretches, parts, hidden communication, memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.trace.hidden import hidden_of_ranks
from shardwise.trace.memory import peaks
from shardwise.trace.owners import peak_by_owner
from shardwise.trace.run import Run
from shardwise.trace.stretches import BUBBLE, Part, Stretch, stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in numbers. `parts` and `hidden` are of each rank, in seconds; `held` is at each rank's fullest moment."""

    run: Run
    cut: Sequence[Sequence[Stretch]]
    parts: Sequence[Mapping[Part, float]]
    hidden: Sequence[float]
    held: Sequence[Mapping[str, float]]

    @property
    def step_seconds(self) -> float:
        return self.run.trace.makespan

    def mean(self, *parts: Part) -> float:
        """Seconds of some parts, on average over the ranks."""
        return sum(rank[part] for rank in self.parts for part in parts) / max(len(self.parts), 1)

    @property
    def bubble_seconds(self) -> float:
        return self.mean(*BUBBLE)

    @property
    def peaks(self) -> list[float]:
        """What each rank holds at most: bytes where they were measured, else microbatches of a stage."""
        if self.run.trace.holdings:
            return [sum(owners.values()) for owners in self.held]
        return list(peaks(self.run.trace))


def summarize(run: Run) -> Summary:
    cut = stretches(run.trace)
    parts = []
    for rank in cut:
        seconds = dict.fromkeys(Part, 0.0)
        for stretch in rank:
            seconds[stretch.part] += stretch.seconds
        parts.append(seconds)
    return Summary(
        run=run,
        cut=cut,
        parts=parts,
        hidden=hidden_of_ranks(run.trace, cut),
        held=peak_by_owner(run.trace) if run.trace.holdings else [{} for _ in range(run.trace.num_ranks)],
    )
