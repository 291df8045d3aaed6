"""Compute only the makespan of a schedule: the longest path through its dependencies.

If the only transfers are values between stages, all with the same latency and without contention, a receive is always
posted in time for its send (`passes/communication.py`), and events need not be simulated one by one. `simulate` gives
the same number (`tests/schedule/test_makespan.py`) together with all events, in thirty times the time.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shardwise.schedule.instruction import Kind
from shardwise.schedule.placement import Placement
from shardwise.schedule.schedule import Schedule


class _Step(NamedTuple):
    """Instructions of one kind on one stage: their dependencies (list of ends, and transfer time), the list of their
    own ends, and their duration."""

    waits: list[tuple[list[float], float]]
    made: list[float] | None
    seconds: float


def makespan(schedule: Schedule, seconds: Mapping[tuple[Kind, int], float], hop: float) -> float:
    """Return the seconds of a compute-only schedule. `seconds` has the duration of each kind on each stage."""
    steps = _steps(schedule, seconds, hop)
    position, now = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    asleep: dict[tuple[int, int], list[int]] = {}
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        order, place, time = schedule.orders[rank], position[rank], now[rank]
        while place < len(order):
            instruction = order[place]
            back = instruction[4]
            parts = (instruction,) if back is None else (instruction, back)
            start, taken, missing = time, 0.0, None
            for kind, stage, microbatch, _, _ in parts:
                waits, _, needed = steps[kind, stage]
                taken += needed
                for ends, after in waits:
                    end = ends[microbatch]
                    if end < 0:
                        missing = id(ends), microbatch
                        break
                    if end + after > start:
                        start = end + after
            if missing is not None:
                asleep.setdefault(missing, []).append(rank)
                break
            time = start + taken
            for kind, stage, microbatch, _, _ in parts:
                made = steps[kind, stage][1]
                if made is not None:
                    made[microbatch] = time
                    if asleep:
                        ready.extend(asleep.pop((id(made), microbatch), ()))
            place += 1
        position[rank], now[rank] = place, time
    assert all(place == len(order) for place, order in zip(position, schedule.orders, strict=True)), "ranks wait"
    return max(now)


def _steps(schedule: Schedule, seconds: Mapping[tuple[Kind, int], float], hop: float) -> dict[tuple[Kind, int], _Step]:
    """Return each kind on each stage, with lists of the end of each microbatch: -1 until it has ended."""
    placement, count = schedule.placement, schedule.total_microbatches
    ends = {
        (kind, stage): [-1.0] * count
        for kind in (Kind.F, Kind.I)
        for stage in range(placement.num_stages)
    }  # fmt: skip
    return {
        (kind, stage): _Step(
            [(ends[needed], after) for needed, after in waits],
            ends.get((Kind.I if kind is Kind.B else kind, stage)),
            seconds[kind, stage],
        )
        for (kind, stage), waits in _waits(placement, hop).items()
        if (kind, stage) in seconds
    }


def _waits(placement: Placement, hop: float) -> dict[tuple[Kind, int], list[tuple[tuple[Kind, int], float]]]:
    """Return, for each kind on each stage, its dependencies and the transfer time of each."""
    ranks = placement.ranks
    waits: dict[tuple[Kind, int], list[tuple[tuple[Kind, int], float]]] = {}
    for stage, rank in enumerate(ranks):
        ahead = [((Kind.F, each), hop * (ranks[each] != rank)) for each in placement.sources[stage]]
        back = [((Kind.I, each), hop * (ranks[each] != rank)) for each in placement.targets[stage]]
        waits[Kind.F, stage] = ahead
        waits[Kind.B, stage] = waits[Kind.I, stage] = [((Kind.F, stage), 0.0), *back]
        waits[Kind.W, stage] = [((Kind.I, stage), 0.0)]
    return waits
