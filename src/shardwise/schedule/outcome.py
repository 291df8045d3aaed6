"""Make, verify, simulate and measure a schedule for one question, and write it to files."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.output import check_output, save_outputs
from shardwise.schedule.catalogue import CATALOGUE, make_schedule
from shardwise.schedule.instruction import SENDS
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.question import Question
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import simulate
from shardwise.schedule.text import print_schedule
from shardwise.schedule.verify import peak_held, verify
from shardwise.trace.events import Lane, Trace
from shardwise.units import counted

#: A larger schedule takes minutes to make and play, and says no more: a long step repeats itself.
_MOST_FORWARDS = 200_000

_SUFFIXES = (".svg", ".json", ".schedule", ".txt", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A schedule and its simulated trace. `makespan` and `span` are those of one step.

    For a schedule that never flushes, they are the time between the ends of two steps once the pipeline is full.
    """

    question: Question
    schedule: Schedule
    trace: Trace
    makespan: float
    span: float

    @property
    def bubble(self) -> float:
        """The part of the span in which not even the busiest rank works."""
        work = max(self.trace.busy) / self.schedule.num_steps
        return max(0.0, 1 - work / self.span) if self.span > 0 else 0.0

    @property
    def peaks(self) -> list[float]:
        """Microbatch-stages held by each rank at most, an activation counting until its W."""
        ranks = range(self.schedule.num_ranks)
        return [peak_held(self.schedule, rank, self.question.kept_for_weights)[0] for rank in ranks]

    @property
    def num_transfers(self) -> int:
        """Sends of one step."""
        sends = sum(instruction.kind in SENDS for order in self.schedule.orders for instruction in order)
        return sends // self.schedule.num_steps


def make(name: str, question: Question) -> Schedule:
    """Return a schedule by name, computation only; `auto` is made for the question's times and memory."""
    _check_size(question)
    if name != "auto":
        return make_schedule(name, question.num_ranks, question.num_microbatches, question.num_chunks)
    from shardwise.schedule.auto.search import auto  # Takes its time to import, and is not always wanted.

    return auto(question)


def _check_size(question: Question) -> None:
    """Refuse a question that would take too long for an interactive command."""
    num_stages = question.num_ranks * (question.num_chunks or 1)
    num_forwards = num_stages * question.num_microbatches
    if num_forwards > _MOST_FORWARDS:
        fewer = min(_MOST_FORWARDS // num_stages, 4 * question.num_ranks)
        raise ShardwiseError(
            f"{question.num_microbatches} microbatches through {counted(num_stages, 'stage')} are {num_forwards} "
            f"forwards, but at most {_MOST_FORWARDS} are played",
            remedy=f"--microbatches {fewer}: a longer step repeats itself" if fewer else "--chunks 2",
        )


def play_out(schedule: Schedule, question: Question) -> Outcome:
    """Verify a schedule, simulate it with the question's prices, and measure it."""
    complete = schedule if schedule.communicates else lower(schedule)
    verify(complete, memory=question.memory, kept_for_weights=question.kept_for_weights)
    trace = simulate(complete, question.prices(complete.placement))
    if complete.staleness == 0:
        makespan, span = trace.makespan, trace.span
    else:
        makespan = span = _steady_step(trace, complete.num_steps)
    return Outcome(question=question, schedule=complete, trace=trace, makespan=makespan, span=span)


def _steady_step(trace: Trace, num_steps: int) -> float:
    """Return the seconds between the ends of the last two steps, over all ranks."""
    ends = [0.0] * num_steps
    for event in trace.events:
        if event.lane is Lane.STEP:
            ends[event.microbatch] = max(ends[event.microbatch], event.end)
    return ends[-1] - ends[-2] if num_steps > 1 else trace.makespan


def names() -> list[str]:
    """Return every available schedule."""
    return [*CATALOGUE, "auto"]


def save(outcome: Outcome, paths: list[Path]) -> None:
    """Write one file for each path, in the form that its ending names. All of them are there whole, or none at all."""
    for path in paths:
        _check_path(path)
    texts = {path: _text(outcome, path.suffix.lower()) for path in paths}
    save_outputs(texts, remedy="--save in a folder that may be written to")


def _check_path(path: Path) -> None:
    """Refuse what cannot be written, before anything is."""
    with suppress(OSError):  # A name that is too long is no folder's.
        if path.is_dir():
            raise ShardwiseError(
                f"{path} cannot be written: it is a folder", remedy=f"--save {path / 'schedule.svg'}, a file in it"
            )
    check_output(path, remedy="--save in a folder that may be written to")
    if path.suffix.lower() not in _SUFFIXES:
        raise ShardwiseError(
            f"{path.name}: nothing is known to be saved as '{path.suffix}'",
            remedy=f"{path.stem}.svg, {path.stem}.json (for Perfetto) or {path.stem}.schedule",
        )


def _text(outcome: Outcome, suffix: str) -> str:
    schedule, question = outcome.schedule, outcome.question
    if suffix == ".svg":
        from shardwise.trace.svg import to_svg

        stages, microbatches = counted(question.num_ranks, "stage"), counted(question.num_microbatches, "microbatch")
        return to_svg(outcome.trace, title=f"{schedule.name}: {stages}, {microbatches}")
    if suffix == ".json":
        from shardwise.trace.perfetto import to_perfetto

        return json.dumps(to_perfetto(outcome.trace))
    return print_schedule(schedule)
