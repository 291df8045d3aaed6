"""What the doctor looks at (a run, its step played again, what instructions usually take), and what it finds."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from shardwise.explain.summary import Summary
from shardwise.schedule.replay import Replay, ranks_by_stages
from shardwise.trace.activities import COPIES
from shardwise.trace.events import Event
from shardwise.trace.hidden import joined, overlap
from shardwise.trace.stretches import Part
from shardwise.units import format_percent

#: What is worth a word: a finding that would gain less than this part of the step is kept to oneself.
WORTH = 0.03

#: What instructions that are alike have in common: the letters of their parts, and their stage.
Alike = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong, the numbers that say so, what to type, and what it would gain.

    `kind` is one of the doctor's words for faults. `gain_seconds` is by how much the step would be shorter, from the
    trace played again with the fix; None where a fix is for memory, or its gain cannot be played. `about` says what
    kind of gain it is then.
    """

    kind: str
    problem: str
    evidence: str
    fix: str
    gain_seconds: float | None = None
    about: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case(Summary):
    """A run on the table."""

    @cached_property
    def replay(self) -> Replay | None:
        """None where the step cannot be played again: then bubbles and slow stages have no gain."""
        return Replay.of(self.trace)

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
    def same(self) -> Sequence[Sequence[int]]:
        """Ranks that compute the same stages, together."""
        return list(ranks_by_stages(self.trace).values())

    def waits(self, *beginnings: str, by_all: bool = False) -> float:
        """Seconds of standing still for what ranks that do the same, or all, do together and is called so; on average.

        Of such ranks the one that comes last stands still for the bytes alone, and the others for it too: what counts
        is the least.
        """
        together = [range(self.trace.num_ranks)] if by_all else self.same
        spent = self._exposed(lambda on: on.startswith(beginnings))
        return sum(len(ranks) * min(spent[rank] for rank in ranks) for ranks in together) / self.trace.num_ranks

    @cached_property
    def transfer_seconds(self) -> float:
        """Seconds, on average over the ranks, of standing still while values move between stages."""
        return sum(self._exposed(lambda on: "SEND_" in on or "RECV_" in on)) / self.trace.num_ranks

    def _exposed(self, is_meant: Callable[[str], bool]) -> list[float]:
        """For each rank, the seconds of standing still while the bytes of what is called so move."""
        return [
            sum(
                each.seconds for each in rank if each.part is Part.EXPOSED and each.on is not None and is_meant(each.on)
            )
            for rank in self.cut
        ]

    @property
    def num_seen(self) -> int:
        """Ranks whose GPU was seen at work."""
        return sum(map(bool, self.trace.activities_of_ranks))

    @cached_property
    def copied_data_seconds(self) -> float:
        """Seconds, on average over the ranks, in which a batch was waited for that was on its way to the GPU."""
        total = 0.0
        for rank, activities in enumerate(self.trace.activities_of_ranks):
            waits = [(each.start, each.end) for each in self.cut[rank] if each.part is Part.DATA]
            total += overlap(waits, joined([(each.start, each.end) for each in activities if each.kind in COPIES]))
        return total / self.trace.num_ranks

    def offloads(self, key: str) -> bool:
        """Whether the plan keeps something on the host."""
        return self.plan.get(key, "0") not in ("0", "0.0")

    def is_worth(self, gain: float | None) -> bool:
        return gain is not None and gain >= WORTH * self.step_seconds

    def time(self, seconds: float) -> str:
        return self.run.time(seconds)

    def share(self, seconds: float) -> str:
        """A part of the step in per cent."""
        return format_percent(seconds / self.step_seconds) if self.step_seconds > 0 else "0 %"


def alike(event: Event) -> Alike:
    """What an instruction is like."""
    return "".join(_letter(part) for part in event.name.split("&")), event.stage


def medians(events: Sequence[Event]) -> dict[Alike, float]:
    """The usual time of each kind of instruction."""
    return {key: median(values) for key, values in _by_kind(events).items()}


def usual_busy(events: Sequence[Event]) -> float:
    """What a rank would compute for if nothing stalled."""
    usual = medians(events)
    return sum(usual[alike(event)] for event in events)


def least_busy(events: Sequence[Event]) -> float:
    """What a rank would compute for if all instructions of a kind were as quick as the quickest quarter of them.

    What else a machine has to do makes some instructions longer, and a slow device all of them.
    """
    return sum(len(values) * sorted(values)[(len(values) - 1) // 4] for values in _by_kind(events).values())


def _by_kind(events: Sequence[Event]) -> dict[Alike, list[float]]:
    found: dict[Alike, list[float]] = defaultdict(list)
    for event in events:
        found[alike(event)].append(event.seconds)
    return found


def _letter(name: str) -> str:
    return next((each for each in name if not each.isdecimal()), "?")
