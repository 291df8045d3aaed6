"""`shardwise report`: one page that shows a run, or two side by side."""

import argparse
import json
from pathlib import Path

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError
from shardwise.explain.doctor.examine import examine
from shardwise.explain.report.requests import draw as draw_requests
from shardwise.explain.runs_by_name import find_run
from shardwise.output import check_output, save_outputs
from shardwise.trace.events import Trace
from shardwise.trace.run import Run
from shardwise.trace.streams import streams_of_ranks
from shardwise.trace.stretches import Part, parts_of_ranks
from shardwise.units import format_percent

DESCRIPTION = """
Write one HTML file that shows a run: the timeline of all ranks above its
prediction, the parts of the step, memory by owner, the plan with its reasons,
and the findings of the doctor. The page opens from disk and needs no network.
A trace for Perfetto (ui.perfetto.dev) is written next to it.

RUN is a folder written by `shardwise train` or `shardwise profile`, a trace,
or a plan, whose schedule is simulated.
"""

EXAMPLE = """
shardwise report pp=4,schedule=zb-v,microbatches=8
shardwise report pp=4,schedule=zb-v,microbatches=8 pp=4,microbatches=8 --save compared.html
"""

_ELSEWHERE = "--save FILE.html in a folder that may be written to"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, a trace, or a plan")
    parser.add_argument("other", nargs="?", metavar="RUN2", help="another one to compare with")
    parser.add_argument("--save", metavar="FILE", help="write the page here (default: RUN/report.html, or report.html)")


def run(arguments: argparse.Namespace) -> Answer:
    first = find_run(arguments.run)
    second = None if arguments.other is None else find_run(arguments.other)
    if second is not None and second.unit != first.unit:
        raise ShardwiseError(
            f"{arguments.run} and {arguments.other} cannot be compared: one is in seconds, the other simulated",
            remedy="two runs, or two plans",
        )
    path = _path_of(arguments)
    check_output(path, remedy=_ELSEWHERE)
    size = write_report(first, path, second)
    trace = first.trace
    data = {
        "page": str(path),
        "page_bytes": size,
        "perfetto": str(perfetto_beside(path)),
        "step": trace.makespan,
        "unit": first.unit,
        "num_ranks": first.num_ranks,
        "alike": [list(ranks) for ranks in first.alike],
        "parts": [{str(part): seconds for part, seconds in rank.items()} for rank in parts_of_ranks(trace)],
        "streams": streams_as_data(trace),
    }
    return Answer(data=data, render=lambda canvas: _render(canvas, first, path))


def write_report(run: Run, path: Path, other: Run | None = None) -> int:
    """Write the page, and the trace for Perfetto next to it; return the bytes of the page."""
    from shardwise.explain.report.page import make_page
    from shardwise.trace.perfetto import to_perfetto

    text = make_page(run, other, found=examine(run), other_found=() if other is None else examine(other))
    texts = {path: text, perfetto_beside(path): json.dumps(to_perfetto(run.trace))}
    save_outputs(texts, remedy=_ELSEWHERE)
    return len(text.encode())


def perfetto_beside(path: Path) -> Path:
    """Return the path of the trace for Perfetto, next to the page."""
    return path.with_suffix(".perfetto.json")


def _path_of(arguments: argparse.Namespace) -> Path:
    if arguments.save is not None:
        return Path(arguments.save)
    folder = Path(arguments.run)
    return folder / "report.html" if folder.is_dir() else Path("report.html")


def _render(canvas: Canvas, run: Run, path: Path) -> None:
    if run.is_of_requests:
        draw_requests(canvas, run)
        canvas.print(f"\nwritten: {path} and {perfetto_beside(path)}")
        return
    trace = run.trace
    canvas.print(f"{canvas.paint(run.name, 'bold')}: a step of {run.time(trace.makespan)} on {run.num_ranks} ranks")
    if run.unit == "F":
        canvas.print("F is the time of the forward of a microbatch on an average stage")
    if run.alike:
        canvas.print(f"each row is one of {len(run.alike[0])} ranks that do the same, named by the first")
    render_parts(canvas, run)
    render_streams(canvas, run)
    canvas.print(f"\nwritten: {path} and {perfetto_beside(path)}")


def render_parts(canvas: Canvas, run: Run) -> None:
    """Draw how each rank spent its step, in shares of the step."""
    trace = run.trace
    parts = parts_of_ranks(trace)
    shown = [part for part in Part if any(rank[part] > 0 for rank in parts)]
    rows = [
        [run.rank_name(rank), *(format_percent(seconds[part] / (trace.makespan or 1)) for part in shown)]
        for rank, seconds in enumerate(parts)
    ]
    table(["", *shown], rows, canvas)


def streams_as_data(trace: Trace) -> list[list[dict[str, object]]]:
    """Return what each GPU stream of each rank did, in seconds of its step; empty if none was recorded."""
    return [
        [{"stream": use.stream, "role": use.role, "seconds": use.seconds, "idle": use.idle_seconds} for use in rank]
        for rank in streams_of_ranks(trace)
    ]


def render_streams(canvas: Canvas, run: Run) -> None:
    """Draw what each GPU stream did, in shares of its rank's step."""
    trace = run.trace
    uses = [use for rank in streams_of_ranks(trace) for use in rank]
    if not uses:
        return
    words = list(dict.fromkeys(word for use in uses for word in use.seconds))
    rows = []
    for use in uses:
        step = trace.windows[use.rank][1] - trace.windows[use.rank][0] or 1
        shares = [format_percent(use.seconds[word] / step) if word in use.seconds else "" for word in words]
        name = f"rank {use.rank}, stream {use.stream}"
        rows.append([name, use.role, *shares, format_percent(use.idle_seconds / step)])
    canvas.print()
    table(["", "mostly", *words, "idle"], rows, canvas)
