"""`shardwise validate`: compare predictions with published measurements."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError, unknown
from shardwise.planner.runs import Run, read_runs
from shardwise.units import counted, format_percent

DESCRIPTION = """
Predict the step of every run in a table from its layout, and compare with what
was measured: errors of time and memory, how often running out of memory was
predicted, and in sweeps of layouts, how close our first choice is to the best.

The table is a CSV file with one run per line, or the name of a table that
comes with Shardwise.
"""

EXAMPLE = """
shardwise validate korthikanti-2022
shardwise validate korthikanti-2022 --quality A
"""

_TABLES = Path(__file__).parent / "tables"
_QUALITIES = ("A", "B", "C")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUNS.csv", help=f"a table of runs, or one of: {', '.join(_known())}")
    parser.add_argument(
        "--leave-out", action="store_true", help="predict each source with constants fitted on the others"
    )
    parser.add_argument("--quality", metavar="Q", help="use only rows of this quality: A, B or C")


def run(arguments: argparse.Namespace) -> Answer:
    from shardwise.planner.validate import summarise  # Loads numpy, which --help does not need.

    runs = _chosen(read_runs(_find(arguments.runs)), arguments.quality)
    if arguments.leave_out:
        return _left_out(runs)
    summary = summarise(runs)
    return Answer(data=summary, render=lambda canvas: _draw(summary, canvas))


def _left_out(runs: list[Run]) -> Answer:
    from shardwise.planner.leave_out import leave_out
    from shardwise.planner.validate import summarise_left_out

    sources = {run.source for run in runs}
    if len(sources) < 2:
        raise ShardwiseError(
            f"all rows are of one source, {', '.join(sources)}: there is nothing to fit on without it",
            remedy="a table of several sources, or validate without --leave-out",
        )
    summary = summarise_left_out(leave_out(runs))

    def render(canvas: Canvas) -> None:
        _draw_errors(summary, canvas)
        canvas.print(f"mean over sources: {_percent(summary['mean_over_sources'])}")  # type: ignore[arg-type]

    return Answer(data=summary, render=render)


def _known() -> list[str]:
    return sorted(path.stem for path in _TABLES.glob("*.csv"))


def _find(word: str) -> Path:
    path = Path(word)
    if path.exists() or path.suffix:
        return path
    if word not in _known():
        raise unknown("table of runs", word, _known())
    return _TABLES / f"{word}.csv"


def _chosen(runs: list[Run], quality: str | None) -> list[Run]:
    if quality is None:
        return runs
    if quality not in _QUALITIES:
        error = unknown("quality", quality, _QUALITIES)
        raise ShardwiseError(error.problem, remedy=f"--quality {error.remedy or 'A'}")
    chosen = [run for run in runs if run.quality == quality]
    if not chosen:
        found = sorted({run.quality or "none" for run in runs})
        raise ShardwiseError(
            f"none of the {counted(len(runs), 'run')} has quality {quality}; there are: {', '.join(found)}",
            remedy=f"--quality {found[0]}",
        )
    return chosen


def _draw_errors(summary: Mapping[str, Any], canvas: Canvas) -> None:
    """Draw a line for each source, and one for all."""
    rows = [[name, *_cells(of_source)] for name, of_source in summary["by_source"].items()]
    whole = {key: summary[key] for key in ("time", "memory", "oom", "inside_interval")}
    rows.append([canvas.paint("all", "bold"), *_cells({"rows": summary["rows"], **whole})])
    columns = [
        "source",
        "rows",
        "timed",
        "mean error",
        "median",
        "bias",
        "in 90 %",
        "memory",
        "false fits",
        "false ooms",
    ]
    table(columns, rows, canvas)
    canvas.print()


def _draw(summary: Mapping[str, Any], canvas: Canvas) -> None:
    _draw_errors(summary, canvas)
    ranking = summary["ranking"]
    if ranking["sweeps"]:
        canvas.print(
            f"{counted(ranking['sweeps'], 'sweep')}: our first choice is within 3 % of the best measured in "
            f"{ranking['within_3_percent']}, {format_percent(ranking['regret'])} slower on average; "
            f"rank correlation {ranking['spearman']:.2f}"
        )
    if summary["apart"]["rows"]:
        canvas.print(
            f"scored apart: {counted(summary['apart']['rows'], 'row')}, mean error {_percent(summary['apart']['mape'])}"
        )
    for skipped in summary["skipped"]:
        canvas.print(canvas.paint(f"skipped {skipped['id']}: {skipped['why']}", "dim"))


def _cells(group: Mapping[str, Any]) -> list[object]:
    time, oom = group["time"], group["oom"]
    return [
        group["rows"],
        time["rows"],
        _percent(time["mape"]),
        _percent(time["median"]),
        _percent(time["bias"]),
        _percent(group["inside_interval"]),
        _percent(group["memory"]["mape"]),
        f"{oom['false_fits']}/{oom['published_oom']}" if oom["published_oom"] else "-",
        f"{oom['false_ooms']}/{oom['published_ok']}" if oom["published_ok"] else "-",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else format_percent(value)
