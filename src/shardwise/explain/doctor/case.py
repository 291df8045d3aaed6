"""What the doctor looks at: a run, where its time went, and somebody who can play it again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.trace.doctor.player import Player
from shardwise.trace.events import Lane, Trace
from shardwise.trace.owners import peak_by_owner
from shardwise.trace.run import Run
from shardwise.trace.stretches import BUBBLE, Part, Stretch, stretches
from shardwise.units import format_number, format_percent, format_seconds

#: What is worth a word: a finding that would gain less than this part of the step is kept to oneself.
WORTH = 0.03


@dataclass(frozen=True)
class Case:
    """A run on the table. `player` is None where the step cannot be played again."""

    run: Run
    player: Player | None = None

    @property
    def trace(self) -> Trace:
        return self.run.trace

    @cached_property
    def cut(self) -> Sequence[Sequence[Stretch]]:
        return stretches(self.trace)

    @cached_property
    def step(self) -> float:
        return self.trace.makespan

    @cached_property
    def plan(self) -> Mapping[str, str]:
        return {choice.key: choice.value for choice in self.run.plan}

    def size(self, key: str) -> int:
        """A count of the plan; 1 where it says nothing."""
        word = self.plan.get(key, "1")
        return int(word) if word.isdecimal() else 1

    @cached_property
    def num_microbatches(self) -> int:
        return len({event.microbatch for rank in self.trace.compute for event in rank})

    @cached_property
    def layers(self) -> tuple[int, ...] | None:
        """The units of each stage, where they are known."""
        text = self.plan.get("layers") or self.run.facts.get("layers", "")
        parts = text.split("+")
        return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None

    @cached_property
    def peaks(self) -> Sequence[Mapping[str, float]]:
        """For each rank, the bytes of each owner at its fullest moment."""
        return peak_by_owner(self.trace) if self.trace.holdings else ()

    def mean(self, *parts: Part) -> float:
        """Seconds of some parts, on average over the ranks."""
        return sum(each.seconds for rank in self.cut for each in rank if each.part in parts) / self.trace.num_ranks

    @cached_property
    def bubble(self) -> float:
        return self.mean(*BUBBLE)

    @cached_property
    def same(self) -> Sequence[Sequence[int]]:
        """Ranks that compute the same stages, together."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, events in enumerate(self.trace.compute):
            found.setdefault(tuple(sorted({event.stage for event in events})), []).append(rank)
        return list(found.values())

    def waits(self, *beginnings: str, by_all: bool = False) -> float:
        """Seconds of standing still for what ranks that do the same, or all, do together and is called so; on average.

        Of such ranks the one that comes last stands still for the bytes alone, and the others for it too: what counts
        is the least.
        """
        together = [range(self.trace.num_ranks)] if by_all else self.same
        spent = [
            sum(
                each.seconds
                for each in rank
                if each.part is Part.EXPOSED and each.on is not None and each.on.startswith(beginnings)
            )
            for rank in self.cut
        ]
        return sum(len(ranks) * min(spent[rank] for rank in ranks) for ranks in together) / self.trace.num_ranks

    @cached_property
    def transfer_seconds(self) -> float:
        """Seconds, on average over the ranks, of standing still while values move between stages."""
        return (
            sum(
                each.seconds
                for rank in self.cut
                for each in rank
                if each.part is Part.EXPOSED and each.on is not None and ("SEND_" in each.on or "RECV_" in each.on)
            )
            / self.trace.num_ranks
        )

    @cached_property
    def num_transfers(self) -> int:
        return sum(event.lane is Lane.SEND for event in self.trace.events)

    def is_worth(self, gain: float | None) -> bool:
        return gain is not None and gain >= WORTH * self.step

    def time(self, seconds: float) -> str:
        return format_seconds(seconds) if self.run.unit == "s" else format_number(seconds, 4)

    def share(self, seconds: float) -> str:
        """A part of the step in per cent."""
        return format_percent(seconds / self.step) if self.step > 0 else "0 %"
