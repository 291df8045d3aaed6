"""In-memory copies of a run, every few steps: when to make one, what it may cost, and what is reported of it.

    step          ... 40 | 41 ... 79 | 80 | 81 ...
    generation        40 is begun     80 is begun: all ranks report that 40 is complete, and older ones are deleted

Ranks communicate only when a copy begins; otherwise no rank waits for another. The number of steps between copies is
computed from the measured durations of a copy and a step, so that copies cost less than 1 % of the time; or it is given
(`--copies-every`).
"""

import math
import time
from typing import NamedTuple

from shardwise.cluster.local import available_bytes
from shardwise.copies.memory import Memory
from shardwise.trace.journal import note
from shardwise.training.checkpoint.in_memory import CopyWriter
from shardwise.training.job import Job
from shardwise.training.progress import Progress
from shardwise.training.run_copies import RunCopies
from shardwise.training.saving import state_to_save
from shardwise.training.setup import Setup
from shardwise.training.world import World
from shardwise.units import format_bytes

#: The share of a run's time that copies may cost (below 1 %, as the first two come early); their share of a machine's
#: free memory, by default and if the user asked for copies.
_BUDGET, _MEMORY_SHARE, _MEMORY_SHARE_ASKED = 0.006, 0.5, 0.9
#: Steps before the first copy, as the first steps allocate memory; the most steps between two copies.
_FIRST, _MOST_STEPS = 2, 10_000
#: Generations in memory at once: one is complete while the next is made.
_NUM_HELD = 2


class _Told(NamedTuple):
    """What each rank reports when a copy begins."""

    is_busy: bool
    apart: str | None
    cost_seconds: float
    step_seconds: float


class Copier:
    """Makes the copies of one rank. All ranks make the same calls."""

    def __init__(self, job: Job, world: World, setup: Setup, progress: Progress) -> None:
        self._job, self._world, self._setup, self._progress = job, world, setup, progress
        self._copies: RunCopies | None = setup.copies
        self._writer: CopyWriter | None = None
        self._next = setup.step + min(_FIRST, job.copies_every or _FIRST)
        self._last: tuple[int, float] | None = None  # The step and the time at which the last copy began.
        self._begun_step: int | None = None
        #: The last generation whose pieces have all reached their neighbours.
        self._sure_step: int | None = None
        self._cost_seconds = 0.0
        #: The number of copies so far, their total cost, and the time of the start.
        self._num_copies, self._spent_seconds, self._since = 0, 0.0, time.perf_counter()
        self._is_apart, self._failed = False, False
        if self._copies is not None:
            self._writer = CopyWriter(
                self._copies.memory, self._copies.neighbour, rank=world.rank, num_ranks=world.size,
                gather=world.gather, see_to_keeper=self._copies.see_to_keeper,
            )  # fmt: skip

    def is_due(self, step: int) -> bool:
        return self._writer is not None and step >= self._next

    def copy(self, step: int) -> bool:
        """Begin a copy, unless the previous one is still in progress on some rank; then the next step tries again."""
        writer, copies = self._writer, self._copies
        assert writer is not None, "it was due"
        assert copies is not None, "it was due"
        told = self._ask(step)
        if any(each.is_busy for each in told):
            self._next = step + 1
            return False
        begun = time.perf_counter()
        problem = writer.finish()
        self._spent_seconds += self._cost_seconds + self._beside_seconds()
        self._tell(problem, told)
        if self._begun_step is not None and copies.is_first_here:
            self._make_room(copies.memory, writer, is_whole=problem is None, step=step)
        parts, extra = state_to_save(self._world, self._setup)
        if self._begun_step is None:
            writer.agree(parts)
            if not self._has_memory():
                return False
            copies.stand_by()
        writer.save(step, parts, extra)
        self._begun_step, self._last = step, (step, time.perf_counter())
        self._cost_seconds, self._num_copies = time.perf_counter() - begun, self._num_copies + 1
        self._next = step + (self._job.copies_every or _steps_between(told))
        return True

    def _make_room(self, memory: Memory, writer: CopyWriter, *, is_whole: bool, step: int) -> None:
        """Delete generations older than the last complete one. If the last one failed, delete only that."""
        assert self._begun_step is not None, "there was a copy"
        if not is_whole:
            memory.forget_one(writer.generation(self._begun_step))
            return
        if not self._is_apart:
            self._sure_step = self._begun_step
        kept = {self._begun_step, step, self._begun_step if self._sure_step is None else self._sure_step}
        memory.keep_only(map(writer.generation, kept))

    def close(self, *, is_over: bool) -> None:
        """Close the writer; if the run is over, delete the copies too."""
        if self._writer is not None:
            self._writer.close()
        if self._copies is not None:
            if is_over and self._world.is_first:
                self._note_cost()
                self._copies.forget()
            self._copies.close()

    def _ask(self, step: int) -> list[_Told]:
        writer, seconds = self._writer, 0.0
        assert writer is not None, "it was due"
        if self._last is not None:
            seconds = (time.perf_counter() - self._last[1]) / max(1, step - self._last[0])
        spent = self._cost_seconds + self._beside_seconds()
        told: list[_Told] = self._world.gather(_Told(writer.is_busy, writer.apart, spent, seconds))
        return told

    def _beside_seconds(self) -> float:
        """Return the cost of the last copy's thread. It is 0 beside a GPU; on a CPU it takes time from the steps."""
        return self._writer.seconds if self._writer is not None and self._world.device.type == "cpu" else 0.0

    def _note_cost(self) -> None:
        """Write the total cost of copies to the journal."""
        if self._num_copies:
            spent = self._spent_seconds + self._cost_seconds + self._beside_seconds()
            share, between = spent / (time.perf_counter() - self._since), self._next - (self._begun_step or 0)
            note(self._job.folder, "copies", num_copies=self._num_copies, steps_between=between, share=round(share, 5))

    def _has_memory(self) -> bool:
        """Return whether every machine has memory for its copies. If one has not, give up copies with the reason."""
        writer, copies = self._writer, self._copies
        assert writer is not None, "it was asked for a copy"
        assert copies is not None, "it was asked for a copy"
        free = min(copies.memory.free_bytes(), available_bytes())
        told: list[tuple[str, int, int]] = self._world.gather((copies.node, writer.num_bytes, free))
        nodes = list(dict.fromkeys(copies.nodes))
        own = {node: sum(size for name, size, _ in told if name == node) for node in nodes}
        for number, node in enumerate(nodes):
            kept = own[node] + (own[nodes[number - 1]] if len(nodes) > 1 else 0)
            room = min(free for name, _, free in told if name == node)
            share = _MEMORY_SHARE_ASKED if self._job.copies_every else _MEMORY_SHARE
            if _NUM_HELD * kept > share * room:
                self._give_up(
                    f"copies in memory need {format_bytes(_NUM_HELD * kept)} of {node}, and it has"
                    f" {format_bytes(room)} left, of which they may have {share:.0%}"
                )
                return False
        return True

    def _tell(self, problem: str | None, told: list[_Told]) -> None:
        """Warn of a copy that failed, or did not reach its neighbour: once, until one succeeds again."""
        apart = next((each.apart for each in told if each.apart is not None), None)
        if problem is not None and not self._failed:
            self._progress.warn(f"{problem}; training goes on, and the copy before it stays")
        if apart is not None and not self._is_apart:
            self._progress.warn(f"{apart}; until it does, copies are on their own machines alone")
        if self._world.is_first and (problem or apart) and not (self._failed or self._is_apart):
            note(self._job.folder, "copies", problem=problem or apart)
        self._failed, self._is_apart = problem is not None, apart is not None

    def _give_up(self, why: str) -> None:
        assert self._writer is not None, "there were copies"
        self._progress.warn(f"{why}; the run goes on without, and comes back from checkpoints alone (--copies-every 0)")
        if self._world.is_first:
            note(self._job.folder, "copies", problem=why)
        self._writer.close()
        self._writer = None


def _steps_between(told: list[_Told]) -> int:
    """Return the fewest steps for which the slowest rank's copy is within the budget. The first has no measurements."""
    cost, step = max(each.cost_seconds for each in told), max(each.step_seconds for each in told)
    if not cost or not step:
        return _FIRST
    return min(_MOST_STEPS, max(1, math.ceil(cost / (_BUDGET * step))))
