"""A comparison of two runs: which parts became longer or shorter, and on which stage."""

from collections import defaultdict
from collections.abc import Mapping
from html import escape as words

from shardwise.explain.report.sections import caption, change_of, held_text, lead, table
from shardwise.explain.summary import Summary
from shardwise.trace.events import Trace
from shardwise.trace.labels import WORDS, chunks_of_ranks, parts_of
from shardwise.trace.run import Run
from shardwise.trace.stretches import Part
from shardwise.units import format_number, format_percent


def headline(one: Summary, other: Summary) -> str:
    """Return the lines under the title: both runs, how each was cut, and which is faster by how much."""
    quick, slow = sorted((one, other), key=lambda each: each.step_seconds)
    told = "Their steps take as long."
    if quick.step_seconds < slow.step_seconds * 0.9995:
        less = 1 - quick.step_seconds / slow.step_seconds
        told = (
            f"A step of {words(quick.run.name)} takes {format_percent(less)} less time: "
            f"{quick.run.time(quick.step_seconds)} instead of {slow.run.time(slow.step_seconds)}."
        )
    named = (f"<b>{words(each.run.name)}</b>: {lead(each)}" for each in (one, other))
    return "<br>".join([*named, told])


def comparison(one: Summary, other: Summary) -> str:
    """Return the section that compares, as HTML."""
    rows = [
        _row("step", one.step_seconds, other.step_seconds, one.run),
        _row("bubble", one.bubble_seconds, other.bubble_seconds, one.run),
    ]
    for part in Part:
        if one.mean(part) > 0 or other.mean(part) > 0:
            rows.append(_row(str(part), one.mean(part), other.mean(part), one.run))
    if any(one.peaks) and bool(one.run.trace.holdings) == bool(other.run.trace.holdings):
        most, then = max(one.peaks), max(other.peaks)
        rows.append(["most held", held_text(most, one), held_text(then, other), change_of(then, most)])
    names = [words(one.run.name), words(other.run.name)]
    unit = "time" if one.run.unit == "s" else "time in F"
    head = [f"{unit}, on average over ranks", *names, "change"]
    text = f"{names[0]} against {names[1]}; a change is from the second to the first."
    return (
        '<section aria-labelledby="comparison-head"><h2 id="comparison-head">Two runs compared</h2>'
        f"{table(head, rows)}{caption(text, of='table')}{_by_stage(one, other)}</section>"
    )


def _row(name: str, value: float, before: float, run: Run) -> list[str]:
    return [name, run.time(value), run.time(before), change_of(before, value, more_is_worse=name != "compute")]


def _by_stage(one: Summary, other: Summary) -> str:
    mine, theirs = mean_seconds(one.run.trace), mean_seconds(other.run.trace)
    both = [key for key in mine if key in theirs]
    if {stage for stage, _ in mine} != {stage for stage, _ in theirs}:
        return ""  # Stages of another number are other stages.
    rows = [
        [
            f"stage {format_number(stage)}",
            WORDS.get(kind, kind),
            one.run.time(mine[stage, kind]),
            other.run.time(theirs[stage, kind]),
            change_of(theirs[stage, kind], mine[stage, kind]),
        ]
        for stage, kind in sorted(both)
    ]
    head = ["stage", "computation", words(one.run.name), words(other.run.name), "change"]
    return table(head, rows, in_words=(0, 1)) + caption("One microbatch on each stage, on average.", of="table")


def mean_seconds(trace: Trace) -> Mapping[tuple[int, str], float]:
    """Return the average time of one microbatch on each stage, by kind of computation. Pairs are left out."""
    totals: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    chunks = chunks_of_ranks(trace)
    for rank, events in enumerate(trace.compute):
        for event in events:
            parts = parts_of(event, chunks[rank])
            if len(parts) == 1:
                total = totals[event.stage, parts[0].kind]
                total[0] += event.seconds
                total[1] += 1
    return {key: seconds / count for key, (seconds, count) in totals.items()}
