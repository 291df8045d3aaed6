"""Prove, before anything runs, that a schedule can run and is complete.

The checks in `problems.py`: every instruction is of a stage of its rank; each microbatch goes forward and backward
through each of its stages once; each value is made before it is used; sends and receives of a link match in order;
in-order ranks with such links cannot deadlock; gradients of tied weights meet in one reduction before their step; all
stages take part in steps and reductions; gathered parameters are there when they are used. This module checks that no
rank exceeds its memory. A failure names its rank, instruction and reason, and is drawn with the place marked.
"""

from collections.abc import Sequence

from shardwise.errors import ShardwiseError
from shardwise.schedule.prices import activations
from shardwise.schedule.problems import Places, problems
from shardwise.schedule.schedule import Schedule
from shardwise.units import format_number

#: How many instructions a drawing shows before and behind a place at fault.
_SHOWN_BEFORE, _SHOWN_BEHIND = 5, 4


class InvalidScheduleError(ShardwiseError):
    """A schedule that must not run, with its drawing in the problem."""


def _invalid(schedule: Schedule, places: Places, problem: str, remedy: str) -> InvalidScheduleError:
    lines = [problem, *(f"    {line}" for line in draw_places(schedule, places))]
    return InvalidScheduleError("\n".join(lines), remedy=remedy)


def verify(schedule: Schedule, *, memory: Sequence[float] | None = None, kept_for_weights: float = 1.0) -> None:
    """Raise `InvalidScheduleError` unless the schedule can run. `memory[rank]` is in microbatch-stages."""
    for places, problem, remedy in problems(schedule):
        raise _invalid(schedule, places, problem, remedy)
    if memory is not None:
        _check_memory(schedule, memory, kept_for_weights)


def peak_held(schedule: Schedule, rank: int, kept_for_weights: float = 1.0) -> tuple[float, int]:
    """Return the peak memory of a rank in microbatch-stages, and the first position where it is reached.

    The order alone determines this, because a rank's computation runs in order. An offload counts from its position on.
    """
    held = activations(schedule.placement, kept_for_weights)
    now, most, where = 0.0, 0.0, 0
    for position, instruction in enumerate(schedule.orders[rank]):
        at_start, at_end = held(instruction)
        now += at_start
        if now > most + 1e-9:
            most, where = now, position
        now += at_end
    # Fractions of a stage, such as thirds, do not add up exactly in floating point.
    return round(most, 9), where


def _check_memory(schedule: Schedule, memory: Sequence[float], kept_for_weights: float) -> None:
    peaks = [peak_held(schedule, rank, kept_for_weights) for rank in range(schedule.num_ranks)]
    for rank, ((most, position), limit) in enumerate(zip(peaks, memory, strict=True)):
        if most > limit + 1e-9:
            fullest = max(peak for peak, _ in peaks)
            problem = (
                f"{schedule.name} holds {format_number(most)} microbatch-stages on rank {rank} at "
                f"{schedule.orders[rank][position]}, but may hold {format_number(limit)} "
                f"({format_number(most - limit)} too many)"
            )
            remedy = f"--memory {format_number(fullest)}, or auto, which makes a schedule for the memory there is"
            raise _invalid(schedule, [(rank, position)], problem, remedy)


def draw_places(schedule: Schedule, places: Places) -> list[str]:
    """Draw the orders around the places at fault, with those in brackets. Other ranks are drawn from their start."""
    lines, width = [], len(str(schedule.num_ranks - 1))
    for rank, order in enumerate(schedule.orders):
        marked = [position for where, position in places if where == rank]
        if not marked and schedule.num_ranks > 16:
            continue
        start = max(0, min(marked) - _SHOWN_BEFORE) if marked else 0
        stop = (max(marked) if marked else _SHOWN_BEFORE) + 1 + _SHOWN_BEHIND
        near = enumerate(order[start:stop], start=start)
        shown = [f"[{each}]" if position in marked else str(each) for position, each in near]
        if len(shown) > 24:
            shown = [*shown[:12], "...", *shown[-12:]]
        text = " ".join(["..."] * (start > 0) + shown + ["..."] * (stop < len(order)))
        lines.append(f"rank {rank:<{width}}  {text}".rstrip())
    return lines
