"""The report of served requests: what each of them waited for, in shares of its own time. Steps and ranks have no part.

A row of such a trace is a request, and its events add up to its time (`serving/request_trace.py`).
"""

from collections import Counter
from html import escape as words
from statistics import mean

from shardwise.answer import Canvas
from shardwise.answer import table as draw_table
from shardwise.explain.doctor.requests import seconds_by_name
from shardwise.explain.report.sections import caption, share_of, table
from shardwise.trace.run import REQUESTS, Run
from shardwise.units import counted, format_percent

#: The most requests in the terminal, the slowest ones.
_MOST_SHOWN = 10


def lead(run: Run) -> str:
    """Return the line under the title."""
    model = run.trace.name.removeprefix(REQUESTS)
    return words(f"Measured \N{MIDDLE DOT} {counted(run.num_ranks, 'request')} to {model}")


def figures(run: Run) -> str:
    """Return the few numbers at the top."""
    rows = seconds_by_name(run)
    times = [sum(row.values()) for row in rows.values()] or [0.0]
    computed = sum(row.get("computed", 0.0) for row in rows.values())
    shown = {
        "requests": str(run.num_ranks),
        "in": run.time(run.trace.makespan),
        "mean time": run.time(mean(times)),
        "longest": run.time(max(times)),
        "computed": format_percent(computed / (sum(times) or 1.0)),
    }
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in shown.items())


def parts(run: Run) -> str:
    """Return the table of all requests, the slowest first."""
    names, rows = _rows(run)
    cells = [[run.rank_name(number), run.time(whole), *shares] for number, whole, shares in rows]
    text = (
        "What each request did and waited for, in per cent of its own time, the slowest first. It waits for other "
        "prompts too while they make its own steps longer."
    )
    return table(["", "time", *map(words, names)], cells) + caption(text, of="table")


def draw(canvas: Canvas, run: Run) -> None:
    """Draw the slowest requests in the terminal."""
    names, rows = _rows(run)
    canvas.print(
        f"{canvas.paint(run.name, 'bold')}: {counted(run.num_ranks, 'request')} in {run.time(run.trace.makespan)}"
    )
    if len(rows) > _MOST_SHOWN:
        canvas.print(f"the {_MOST_SHOWN} slowest; the page has all")
    shown = [[run.rank_name(number), run.time(whole), *shares] for number, whole, shares in rows[:_MOST_SHOWN]]
    draw_table(["", "time", *names], shown, canvas)


def _rows(run: Run) -> tuple[list[str], list[tuple[int, float, list[str]]]]:
    """Return the names of what requests did; and of each request its number, its seconds, and the shares of these."""
    rows = seconds_by_name(run)
    total = Counter[str]()
    for row in rows.values():
        total.update(row)
    names = [name for name, _ in total.most_common()]
    told = []
    for number, row in sorted(rows.items(), key=lambda pair: -sum(pair[1].values())):
        whole = sum(row.values())
        told.append((number, whole, [share_of(row.get(name, 0.0), whole) for name in names]))
    return names, told
