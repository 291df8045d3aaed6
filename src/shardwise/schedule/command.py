"""`shardwise schedule`: draw, price, prove, save and compare pipeline schedules."""

import argparse
from pathlib import Path
from typing import Any

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError, unknown
from shardwise.schedule.catalogue import CATALOGUE
from shardwise.schedule.outcome import Outcome, make, names, play_out, save
from shardwise.schedule.question import Question, make_question
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.text import load_schedule
from shardwise.trace.attribution import Cause, critical_path, idle_by_cause
from shardwise.trace.timeline import draw, legend, memory_bars
from shardwise.units import counted, format_number, format_percent

DESCRIPTION = """
Draw a pipeline schedule, simulate it with the times of its stages, and print
its cost:

  makespan  from the first start to the last end
  span      the longest busy window of a rank
  bubble    the part of the span in which even the busiest rank is idle
  memory    the most activations that each rank holds

F, I and W are the forward, the gradient of the input and the gradient of the
weights.
"""

EXAMPLE = """
shardwise schedule zb-v --stages 4 --microbatches 8
shardwise schedule auto --stages 4 --microbatches 12 --times 1,1.2,0.8 --hop 0.05 --memory 3
shardwise schedule 1f1b --stages 4 --microbatches 8 --save 1f1b.schedule --save 1f1b.svg --save 1f1b.perfetto.json
shardwise schedule --compare --stages 4 --microbatches 8
"""

#: Drawings of more computations than this are unreadable; they can still be saved.
_MOST_DRAWN = 6000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"a file, or one of: {', '.join(names())}")
    parser.add_argument("--compare", action="store_true", help="print a table of all schedules")
    parser.add_argument("--stages", type=int, metavar="P", help="number of pipeline ranks")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches per step")
    parser.add_argument("--chunks", type=int, metavar="V", help="chunks per rank, if the schedule leaves a choice")
    parser.add_argument(
        "--times", metavar="F,I,W", help="times of a microbatch on all chunks of a rank (default: 1,1,1)"
    )
    parser.add_argument("--stage-times", metavar="FILE", help="the same for unequal stages: a line F,I,W for each")
    parser.add_argument(
        "--pair", type=float, metavar="T", help="time of an overlapped forward and backward (default: F+I+W)"
    )
    parser.add_argument("--hop", metavar="T", help="time of a transfer between ranks; T,T,... for each boundary")
    parser.add_argument(
        "--slowdown", type=float, default=0.0, metavar="X", help="compute takes 1+X times as long during a transfer"
    )
    parser.add_argument(
        "--memory", metavar="N", help="activations, in microbatches, that a rank may hold; N,N,... for each"
    )
    parser.add_argument(
        "--kept-for-weights",
        type=float,
        default=1.0,
        metavar="X",
        help="fraction of an activation kept from I to W (default: 1)",
    )
    parser.add_argument(
        "--save",
        action="append",
        default=[],
        metavar="FILE",
        help="write .svg (drawing), .json (Perfetto trace), or any other name (the schedule itself)",
    )


def run(arguments: argparse.Namespace) -> Answer:
    if arguments.compare:
        return _compare(arguments)
    if arguments.name is None:
        raise ShardwiseError("no schedule is named", remedy=f"shardwise schedule 1f1b, or one of: {', '.join(names())}")
    schedule, question = _get_schedule(arguments)
    outcome = play_out(schedule, question)
    if arguments.save:
        save(outcome, [Path(path) for path in arguments.save])
    return Answer(data=_data(outcome), render=lambda canvas: _render(outcome, arguments.save, canvas))


def _get_schedule(arguments: argparse.Namespace) -> tuple[Schedule, Question]:
    name = arguments.name
    path = Path(name)
    if name in names():
        question = _get_question(arguments, arguments.stages, arguments.microbatches)
        return make(name, question), question
    if not (path.suffix or "/" in name or _is_file(path)):
        error = unknown("schedule", name, names())
        remedy = f"shardwise schedule {error.remedy or '1f1b'}, or the path of a schedule file"
        raise ShardwiseError(error.problem, remedy=remedy)
    schedule = load_schedule(path)
    if (arguments.stages, arguments.microbatches, arguments.chunks) != (None, None, None):
        raise ShardwiseError(
            f"{path.name} is a file that already gives its stages, microbatches and chunks",
            remedy=f"shardwise schedule {name}",
        )
    return schedule, _get_question(arguments, schedule.num_ranks, schedule.num_microbatches)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # The text is too long for the name of a file.
        return False


def _get_question(arguments: argparse.Namespace, num_ranks: int | None, num_microbatches: int | None) -> Question:
    if num_ranks is None:
        raise ShardwiseError("--stages is missing", remedy="--stages 4")
    if num_microbatches is None:
        raise ShardwiseError("--microbatches is missing", remedy="--microbatches 8")
    names = ("times", "stage_times", "pair", "hop", "memory", "kept_for_weights", "slowdown")
    options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    return make_question(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=arguments.chunks, **options)


def _data(outcome: Outcome) -> dict[str, object]:
    schedule, trace = outcome.schedule, outcome.trace
    return {
        "name": schedule.name,
        "num_stages": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "num_chunks": schedule.placement.num_chunks,
        "num_steps": schedule.num_steps,
        "makespan": outcome.makespan,
        "span": outcome.span,
        "bubble": outcome.bubble,
        "peak_activations": outcome.peaks,
        "num_instructions": schedule.num_instructions,
        "num_transfers": outcome.num_transfers,
        "ranks": [
            {"span": span, "busy": busy, "idle": {str(cause): seconds for cause, seconds in idle.items()}}
            for span, busy, idle in zip(trace.spans, trace.busy, idle_by_cause(trace), strict=True)
        ],
        "critical_path": [event.name for event in critical_path(trace) if event.seconds > 0],
    }


def _render(outcome: Outcome, saved: list[str], canvas: Canvas) -> None:
    schedule, trace = outcome.schedule, outcome.trace
    chunks = schedule.placement.num_chunks
    canvas.print(
        f"{canvas.paint(schedule.name, 'bold')}: {counted(schedule.num_ranks, 'stage')}, "
        f"{counted(schedule.num_microbatches, 'microbatch')}{f', {chunks} chunks a rank' if chunks > 1 else ''}\n"
    )
    if sum(map(len, trace.compute)) <= _MOST_DRAWN:
        for line in [*draw(trace, width=canvas.width, paint=canvas.paint), "", legend(canvas.paint), ""]:
            canvas.print(line)
    else:
        canvas.print("too many computations to draw here: --save FILE.svg, or FILE.json for Perfetto\n")
    _render_numbers(outcome, canvas)
    for path in saved:
        canvas.print(f"saved {path}")


def _render_numbers(outcome: Outcome, canvas: Canvas) -> None:
    trace, schedule = outcome.trace, outcome.schedule
    step = "a step, once the pipe is full," if schedule.staleness else "makespan"
    canvas.print(
        f"{step} {format_number(outcome.makespan, 6)}, span {format_number(outcome.span, 6)}, "
        f"bubble {format_percent(outcome.bubble)}, {schedule.num_instructions} instructions"
    )
    if schedule.staleness:
        canvas.print(f"drawn: {counted(schedule.num_steps, 'step')}, {format_number(trace.makespan, 6)} in all")
    path = [event for event in critical_path(trace) if event.seconds > 0]
    lanes = sorted({event.lane for event in path})
    on_path = [(sum(event.seconds for event in path if event.lane is lane), lane) for lane in lanes]
    canvas.print(
        "critical path: "
        + ", ".join(f"{format_number(seconds, 6)} {lane}" for seconds, lane in on_path)
        + f", over ranks {_ranks_of([event.rank for event in path])}\n"
    )
    causes = [cause for cause in Cause if any(idle[cause] > 1e-12 for idle in idle_by_cause(trace))]
    rows = [
        [f"rank {rank}", *(format_number(value, 6) for value in (busy, *(idle[cause] for cause in causes)))]
        for rank, (busy, idle) in enumerate(zip(trace.busy, idle_by_cause(trace), strict=True))
    ]
    table(["", "busy", *map(str, causes)], rows, canvas)
    canvas.print("\nactivations held at most, in microbatch-stages")
    for line in memory_bars(trace, width=canvas.width, paint=canvas.paint):
        canvas.print(line)


def _ranks_of(ranks: list[int]) -> str:
    """Return `0 1 2 3 2 1 0`: the ranks along a path without repetitions, with the middle of a long one left out."""
    stays = [rank for position, rank in enumerate(ranks) if position == 0 or ranks[position - 1] != rank]
    if len(stays) > 24:
        return " ".join([*map(str, stays[:12]), "...", *map(str, stays[-11:])])
    return " ".join(map(str, stays))


def _compare(arguments: argparse.Namespace) -> Answer:
    """Make and simulate every schedule; list those that cannot be made, with the reason."""
    if arguments.name is not None or arguments.save:
        extra = arguments.name if arguments.name is not None else "--save"
        raise ShardwiseError(
            f"--compare covers all schedules and cannot be combined with {extra}", remedy=f"--compare without {extra}"
        )
    question = _get_question(arguments, arguments.stages, arguments.microbatches)
    outcomes: list[tuple[str, Outcome]] = []
    refused: list[tuple[str, str]] = []
    for name in names():
        try:
            outcomes.append((name, play_out(make(name, question), question)))
        except ShardwiseError as error:
            refused.append((name, error.problem.splitlines()[0]))
            if len(refused) == len(names()):
                raise  # If even `auto` fails, no schedule is possible.
    outcomes.sort(key=lambda entry: (entry[1].span, entry[1].makespan))
    data = {
        "num_stages": question.num_ranks,
        "num_microbatches": question.num_microbatches,
        "schedules": [_row(name, outcome) for name, outcome in outcomes],
        "refused": [{"name": name, "why": why} for name, why in refused],
    }
    return Answer(data=data, render=lambda canvas: _render_table(outcomes, refused, question, canvas))


def _row(name: str, outcome: Outcome) -> dict[str, object]:
    return {
        "name": name,
        "makespan": outcome.makespan,
        "span": outcome.span,
        "bubble": outcome.bubble,
        "peak_activations": outcome.peaks,
        "num_chunks": outcome.schedule.placement.num_chunks,
        "num_transfers": outcome.num_transfers,
        "num_weight_copies": _weight_copies(name),
        "num_instructions": outcome.schedule.num_instructions,
    }


def _weight_copies(name: str) -> int:
    if name == "auto":
        return 1
    return CATALOGUE[name].num_weight_copies + (name == "pipedream-2bw")


def _render_table(
    outcomes: list[tuple[str, Outcome]], refused: list[tuple[str, str]], question: Question, canvas: Canvas
) -> None:
    stages, microbatches = counted(question.num_ranks, "stage"), counted(question.num_microbatches, "microbatch")
    canvas.print(f"{stages}, {microbatches}, shortest span first\n")
    columns = ["schedule", "makespan", "span", "bubble", "holds", "weights", "chunks", "sends", "idea"]
    rows = [
        [
            name,
            format_number(outcome.makespan, 6),
            format_number(outcome.span, 6),
            format_percent(outcome.bubble),
            format_number(max(outcome.peaks), 4),
            f"{_weight_copies(name)}x",
            outcome.schedule.placement.num_chunks,
            outcome.num_transfers,
            CATALOGUE[name].idea if name in CATALOGUE else "made for these times and this memory",
        ]
        for name, outcome in outcomes
    ]
    table(columns, rows, canvas)
    canvas.print("\nholds: microbatch-stages on the fullest rank; weights: copies of the parameters")
    for name, why in refused:
        canvas.print(f"{canvas.paint('left out', 'dim')} {name}: {why}")
