"""Find ranks that are slow repeatedly (stragglers), and the cause, from steps that were recorded anyway.

Ranks wait for each other, so all have the same step time; the slow rank is the one that the others wait for. Its own
times show the cause:

    compute   its own work takes longer than that of ranks with the same work (its stage, in other pipelines). A rank
              that is alone in its stage is compared with its own first steps, relative to how others have changed
    data      it waits longer for its batch than the others
    link      messages to it take longer in transit than messages to ranks of the same stage

One step says little: a rank is reported if it was slow, with the same cause, in most of the last recorded steps. It
counts as slow only if the others lose a tenth of the step because of it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from shardwise.trace.events import Trace
from shardwise.trace.stretches import Part, parts_of_ranks
from shardwise.units import format_seconds

#: The number of last looks that count, and in how many of them a rank must be slow to be named.
LOOKS, SLOW_LOOKS = 10, 8
#: A look sooner after the last is left out: a machine that is busy for a moment is not a slow rank.
SECONDS_BETWEEN_LOOKS = 2.0
#: How much longer a rank takes than similar ones, and the share of a step that is lost by it.
_TIMES, _SHARE = 1.5, 0.1
#: The number of first looks that a rank without a similar one is compared with.
_FIRST_LOOKS = 5


class SlowCause(StrEnum):
    """Why a rank is slow."""

    COMPUTE = "compute"
    DATA = "data"
    LINK = "link"


_PARTS = {
    SlowCause.COMPUTE: (
        Part.COMPUTE, Part.RECOMPUTATION, Part.OPTIMIZER, Part.COPIES, Part.LAUNCH, Part.HOST,
    ),
    SlowCause.DATA: (Part.DATA,),
    SlowCause.LINK: (Part.EXPOSED,),
}  # fmt: skip
_SAID = {
    SlowCause.COMPUTE: ("computes", "of a step"),
    SlowCause.DATA: ("waits", "for its batch"),
    SlowCause.LINK: ("waits", "for what is on its way to it"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A slow rank: its seconds of a step by that cause, those of others, and in how many of the last looks."""

    rank: int
    cause: SlowCause
    seconds: float
    others_seconds: float
    looks: int

    def __str__(self) -> str:
        does, what = _SAID[self.cause]
        return (
            f"rank {self.rank} is slow ({self.cause}): it {does} {format_seconds(self.seconds)} {what}, others"
            f" {format_seconds(self.others_seconds)}, in {self.looks} of the last {LOOKS} steps that were looked at"
        )


@dataclass(frozen=True, slots=True)
class _Look:
    """One rank in one step, by one cause: its seconds, the expected ones, and whether that is slow."""

    seconds: float
    expected: float
    is_slow: bool


class Slowness:
    """Examines recorded steps. `alike` has the work of each rank: ranks with equal entries do the same.

    Without `has_links` all ranks are on one host, and what moves between them is its own memory.
    """

    def __init__(self, alike: Sequence[int], *, has_links: bool) -> None:
        self._alike = alike
        self._causes = [cause for cause in SlowCause if has_links or cause is not SlowCause.LINK]
        self._looks: dict[tuple[int, SlowCause], deque[_Look]] = {
            (rank, cause): deque(maxlen=LOOKS) for rank in range(len(alike)) for cause in self._causes
        }
        self._first: list[list[float]] = [[] for _ in alike]
        self._looked: int | None = None
        self._found: list[SlowRank] = []

    def look(self, trace: Trace, step: int) -> list[SlowRank]:
        """Take a step of this number into account; return the ranks that are slow now.

        All ranks have the trace, and find the same: so how long ago the last look was is told by steps, and no clock.
        """
        if self._looked is not None and (step - self._looked) * trace.makespan < SECONDS_BETWEEN_LOOKS:
            return self._found
        self._looked = step
        parts = parts_of_ranks(trace)
        for cause in self._causes:
            seconds = [sum(mine[part] for part in _PARTS[cause]) for mine in parts]
            if cause is SlowCause.COMPUTE:
                self._keep_first(seconds)
            for rank, mine in enumerate(seconds):
                expected = self._expected(rank, cause, seconds)
                if expected is None:
                    continue
                is_slow = mine > _TIMES * expected and mine - expected > _SHARE * trace.makespan
                self._looks[rank, cause].append(_Look(mine, expected, is_slow))
        self._found = [found for key in self._looks if (found := self._find(*key)) is not None]
        return self._found

    def _expected(self, rank: int, cause: SlowCause, seconds: Sequence[float]) -> float | None:
        """Return the rank's expected seconds if it were as fast as others; None if that is unknown."""
        others = [other for other in range(len(seconds)) if other != rank]
        if cause is not SlowCause.DATA:
            same = [other for other in others if self._alike[other] == self._alike[rank]]
            if same or cause is SlowCause.LINK:
                return median(seconds[other] for other in same) if same else None
            # Each is compared with its own first steps: what slows the whole machine slows all of them.
            first = [median(mine) for mine in self._first]
            if not others or len(self._first[rank]) < _FIRST_LOOKS or not all(first):
                return None
            return first[rank] * median(seconds[other] / first[other] for other in others)
        return median(seconds[other] for other in others) if others else None

    def _keep_first(self, seconds: Sequence[float]) -> None:
        for first, mine in zip(self._first, seconds, strict=True):
            if len(first) < _FIRST_LOOKS:
                first.append(mine)

    def _find(self, rank: int, cause: SlowCause) -> SlowRank | None:
        slow = [each for each in self._looks[rank, cause] if each.is_slow]
        if len(slow) < SLOW_LOOKS:
            return None
        return SlowRank(
            rank=rank,
            cause=cause,
            seconds=median(each.seconds for each in slow),
            others_seconds=median(each.expected for each in slow),
            looks=len(slow),
        )
