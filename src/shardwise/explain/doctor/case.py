"""The doctor's input (a run, its step simulated again, the usual durations of instructions), and its findings."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from shardwise.explain.summary import Summary
from shardwise.schedule.replay import Replay, ranks_by_stages
from shardwise.trace.activities import COPIES
from shardwise.trace.events import Event, Lane
from shardwise.trace.hidden import joined, overlap
from shardwise.trace.stretches import Part
from shardwise.units import format_percent

#: What is worth a word: a finding that would gain less than this part of the step is kept to oneself.
WORTH = 0.03
#: The same of memory: a part of what the fullest rank holds.
WORTH_BYTES = 0.1
#: A device that is fuller is nearly full: what it holds must become less, and no advice may make it more.
NEARLY_FULL = 0.9
#: Where messages are smaller, a link's latency counts and not their size.
SMALL_MESSAGE = 64 * 1024
#: What ranks are noted to wait for at the sums of a step.
GRADIENT_SUM = "a sum of gradients"

#: What instructions that are alike have in common: the letters of their parts, and their stage.
Alike = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem with its numbers, what to type against it, and the gain.

    `kind` is one of the doctor's words for faults. `gain_seconds` is by how much the step would be shorter, from the
    trace simulated again with the fix. It is None if the fix is for memory, or its gain cannot be simulated; then
    `about` says what kind of gain it is.
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
    """A run under examination."""

    @cached_property
    def replay(self) -> Replay | None:
        """None where the step cannot be played again: then bubbles and slow stages have no gain.

        What the host needs for an instruction is there however small it is, and so is the latency of a message. All
        advice is priced with both, or it would be taken back by the next.
        """
        replay = Replay.of(self.trace)
        if replay is None:
            return None
        return replace(
            replay,
            host_seconds=0.0 if self.trace.activities else self._host_seconds,
            fixed_seconds=self._gap_seconds if self.trace.activities else 0.0,
            units=self._shares(len(replay.stage_seconds)),
            keeps_hop=self.message_bytes is not None and self.message_bytes < SMALL_MESSAGE,
        )

    @property
    def _host_seconds(self) -> float:
        """What passes before an instruction that waits for nothing else; those that wait show none of it."""
        gaps = [each.seconds for rank in self.cut for each in rank if each.part is Part.HOST]
        count = sum(map(len, self.trace.compute)) or 1
        return median(gaps) if len(gaps) > count / 4 else sum(gaps) / count

    @property
    def _gap_seconds(self) -> float:
        """For how much of an instruction its GPU waits for the host."""
        return self.mean(Part.HOST, Part.LAUNCH) * self.trace.num_ranks / (sum(map(len, self.trace.compute)) or 1)

    def _shares(self, num_stages: int) -> tuple[tuple[float, ...], ...]:
        """Return the share of its stage's time that each unit takes: by the costs of units, or equal ones."""
        layers = self.layers
        if layers is None or len(layers) != num_stages or min(layers) < 1:
            return ()
        costs = [[unit.cost for unit in stage] for stage in self.run.units] or [[1.0] * count for count in layers]
        return tuple(tuple(cost / sum(stage) if sum(stage) else 1 / len(stage) for cost in stage) for stage in costs)

    @cached_property
    def message_bytes(self) -> float | None:
        """Of a message between stages, on average; None where none were counted."""
        sent = [each for each in self.trace.traffic if each.peer is not None]
        count = sum(each.num_messages for each in sent)
        return sum(each.num_bytes for each in sent) / count if count else None

    @cached_property
    def plan(self) -> Mapping[str, str]:
        return {choice.key: choice.value for choice in self.run.plan}

    def size(self, key: str) -> int:
        """Return a count of the plan; 1 if it is missing."""
        word = self.plan.get(key, "1")
        return int(word) if word.isdecimal() else 1

    @cached_property
    def num_microbatches(self) -> int:
        return len({event.microbatch for rank in self.trace.compute for event in rank})

    def can_have_microbatches(self, count: int) -> bool:
        """Whether each would have rows, as far as it is known how many there are."""
        rows = self.run.facts.get("batch", "")
        return count > 0 and (not rows.isdecimal() or int(rows) % (count * self.size("dp")) == 0)

    @cached_property
    def layers(self) -> tuple[int, ...] | None:
        """The units of each stage, where they are known."""
        if self.run.units:
            return tuple(map(len, self.run.units))
        text = self.plan.get("layers") or self.run.facts.get("layers", "")
        parts = text.split("+")
        return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None

    @cached_property
    def fullest_bytes(self) -> float:
        """The most that a rank holds at once; 0 where bytes were not counted."""
        return max((sum(owners.values()) for owners in self.held), default=0.0)

    @property
    def is_nearly_full(self) -> bool:
        return self.run.memory_bytes is not None and self.fullest_bytes > NEARLY_FULL * self.run.memory_bytes

    def has_room(self, more_bytes: float) -> bool:
        """Whether a rank may hold this many more bytes, as far as the memory of its device is known."""
        limit = self.run.memory_bytes
        return limit is None or self.fullest_bytes + more_bytes <= NEARLY_FULL * limit

    @cached_property
    def same(self) -> Sequence[Sequence[int]]:
        """Ranks that compute the same stages, together."""
        return list(ranks_by_stages(self.trace).values())

    def waits(self, *beginnings: str, by_all: bool = False) -> float:
        """Return the average seconds of waiting for a named joint operation of ranks with the same work, or of all.

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
        """Return the seconds that each rank waits while the bytes of a named operation move."""
        return [
            sum(
                each.seconds for each in rank if each.part is Part.EXPOSED and each.on is not None and is_meant(each.on)
            )
            for rank in self.cut
        ]

    @property
    def sum_seconds(self) -> float:
        """Seconds, on average over the ranks, for which sums of gradients are under way or are waited for."""
        moves = [
            event.seconds for event in self.trace.events if event.lane is Lane.COLLECTIVE and event.name == GRADIENT_SUM
        ]
        return max(sum(moves) / self.trace.num_ranks, self.waits(GRADIENT_SUM))

    @property
    def num_seen(self) -> int:
        """Ranks whose GPU was seen at work."""
        return sum(map(bool, self.trace.activities_of_ranks))

    @cached_property
    def copied_data_seconds(self) -> float:
        """Return the average seconds over ranks of waiting for a batch in transit to the GPU."""
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
        """Return a share of the step in per cent."""
        return format_percent(seconds / self.step_seconds) if self.step_seconds > 0 else "0 %"


def alike(event: Event) -> Alike:
    """Return the kind of an instruction."""
    return "".join(_letter(part) for part in event.name.split("&")), event.stage


def medians(events: Sequence[Event]) -> dict[Alike, float]:
    """Return the median time of each kind of instruction."""
    return {key: median(values) for key, values in _by_kind(events).items()}


def usual_busy(events: Sequence[Event]) -> float:
    """Return the time that a rank would compute without stalls."""
    usual = medians(events)
    return sum(usual[alike(event)] for event in events)


def least_busy(events: Sequence[Event]) -> float:
    """Return a rank's compute time if all instructions of a kind were as fast as the fastest quarter of them.

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
