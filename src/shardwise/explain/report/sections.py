"""The sections of the page that need no script: bars, tables, the plan, the findings.

Text of users goes through `words`, which escapes markup.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape as words

from shardwise.explain.doctor.case import Finding
from shardwise.explain.summary import Summary
from shardwise.trace.run import Run
from shardwise.trace.stretches import BUBBLE, Part
from shardwise.units import counted, format_bytes, format_number, format_percent

#: The colour of each part, by its name in the style sheet: its first word.
KEYS = {part: part.split()[0] for part in Part} | {Part.COPIES: "copies"}


def figures(summary: Summary, other: Summary | None = None) -> str:
    """Return the few numbers at the top; for two runs, both, and the change."""
    mine = _figures(summary)
    if other is None:
        return _as_list((name, value, note) for name, (value, note, _) in mine.items())
    theirs = _figures(other)
    shown = []
    for name, (value, _, number) in mine.items():
        if name in theirs:
            was, _, before = theirs[name]
            change = "" if name == "ranks" else change_of(before, number, more_is_worse=name != "tokens/s")
            if "%" in value:
                change = _points(before, number, more_is_worse=name != "at work")
            shown.append((name, f"{value} <span class=against>{was}</span>", change))
    return _as_list(shown)


def _points(before: float, after: float, *, more_is_worse: bool) -> str:
    """Return by how many percentage points a share has changed."""
    if abs(after - before) < 0.0005:
        return "same"
    kind = "worse" if (after > before) == more_is_worse else "better"
    sign = "+" if after > before else "\N{MINUS SIGN}"
    return f'<span class="{kind}">{sign}{abs(after - before) * 100:.1f} points</span>'


def _as_list(shown: Iterable[tuple[str, str, str]]) -> str:
    return "".join(
        f"<div><dt>{name}</dt><dd>{value}{f'<small>{note}</small>' if note else ''}</dd></div>"
        for name, value, note in shown
    )


def _figures(summary: Summary) -> dict[str, tuple[str, str, float]]:
    """Return by name: the text, a note, and the number."""
    run, whole = summary.run, summary.step_seconds
    shown = {"step": (run.time(whole), "F: a stage's forward" if run.unit == "F" else "", whole)}
    if run.predicted is not None:
        predicted = run.predicted.makespan
        off = f"{(predicted / whole - 1) * 100:+.1f} %".replace("-", "\N{MINUS SIGN}") if whole > 0 else ""
        shown["predicted"] = run.time(predicted), off, predicted
    shares = {
        "at work": summary.mean(Part.COMPUTE, Part.RECOMPUTATION, Part.OPTIMIZER),
        "bubble": summary.bubble_seconds,
        "exposed communication": summary.mean(Part.EXPOSED),
    }
    for name, seconds in shares.items():
        shown[name] = format_percent(seconds / (whole or 1)), "", seconds / (whole or 1)
    shown["ranks"] = str(run.num_ranks), "", run.num_ranks
    if any(summary.peaks):
        shown["most held"] = held_text(max(summary.peaks), summary), "", max(summary.peaks)
    for name, key, digits in (("tokens/s", "tokens_per_second", 4), ("loss", "loss", 4)):
        if key in run.curves:
            last = run.curves[key][-1][1]
            shown[name] = format_number(last, digits), "at the end", last
    return shown


def held_text(value: float, summary: Summary) -> str:
    """Bytes, or microbatches of a stage where no bytes were measured."""
    return format_bytes(value) if summary.run.trace.holdings else f"{format_number(value, 3)} microbatches"


def parts(summary: Summary, other: Summary | None) -> str:
    """Bars for each rank, beneath each the other run's, and the numbers."""
    longest = max(summary.step_seconds, other.step_seconds if other else 0.0) or 1.0
    every = [*summary.parts, *(other.parts if other else ())]
    shown = [part for part in Part if any(rank[part] > 0 for rank in every)]
    rows = []
    for rank, seconds in enumerate(summary.parts):
        bars = _bars(seconds, longest, summary.run)
        if other is not None and rank < len(other.parts):
            bars += _bars(other.parts[rank], longest, other.run, kind=" second")
        work = share_of(seconds[Part.COMPUTE], summary.step_seconds)
        name = summary.run.rank_name(rank)
        rows.append(f'<span class="name">{name}</span><div>{bars}</div><span class="seconds">{work}</span>')
    legend = "".join(f'<span><i style="background:var(--{KEYS[part]})"></i>{part}</span>' for part in shown)
    note = "" if other is None else f" Beneath each, {words(other.run.name)}."
    text = (
        "Every rank's step, cut into what it went into; at the right, the share in which it computed. "
        f"The parts of a rank add up to the step.{note}"
    )
    return (
        f'<div class="stack">{"".join(rows)}</div><div class="legend">{legend}</div>'
        f"{caption(text)}{_parts_table(summary, shown)}"
    )


def _bars(seconds: Mapping[Part, float], longest: float, run: Run, *, kind: str = "") -> str:
    bars = "".join(
        f'<i style="width:{100 * seconds[part] / longest:.3f}%;background:var(--{KEYS[part]})" '
        f'title="{part}: {run.time(seconds[part])}"></i>'
        for part in Part
        if seconds[part] > 0
    )
    return f'<div class="bars{kind}">{bars}</div>'


def _parts_table(summary: Summary, shown: Sequence[Part]) -> str:
    whole = summary.step_seconds
    head = ["", *(str(part) for part in shown), "bubble", "hidden communication", "sum"]
    rows = []
    for rank, seconds in enumerate(summary.parts):
        cells = [share_of(seconds[part], whole) for part in shown]
        bubble = sum(seconds[part] for part in BUBBLE)
        total = summary.run.time(sum(seconds.values()))
        name, hidden = summary.run.rank_name(rank), share_of(summary.hidden[rank], whole)
        rows.append([name, *cells, share_of(bubble, whole), hidden, total])
    note = (
        "Shares of the step, in per cent of it. The bubble is warm-up, waiting and cool-down together; hidden "
        "communication took place beside work and is in no sum."
    )
    return f"{table(head, rows)}{caption(note, of='table')}"


def streams(summary: Summary) -> str:
    """Return the activities of each GPU stream; empty if none was recorded."""
    uses = [use for rank in summary.streams for use in rank]
    if not uses:
        return ""
    kinds = list(dict.fromkeys(kind for use in uses for kind in use.seconds))
    rows = []
    for use in uses:
        begin, end = summary.trace.windows[use.rank]
        cells = [share_of(use.seconds.get(kind, 0.0), end - begin) for kind in kinds]
        total = summary.run.time(use.idle_seconds + sum(use.seconds.values()))
        name = f"rank {use.rank}, stream {use.stream}"
        rows.append([name, use.role, *cells, share_of(use.idle_seconds, end - begin), total])
    note = "Streams of each GPU, by its own clock, in shares of the rank's step; the busiest first."
    return table(["", "mostly", *map(words, kinds), "idle", "sum"], rows, in_words=(1,)) + caption(note, of="table")


def memory(summary: Summary) -> str:
    """Return the owners of memory at each rank's peak."""
    trace = summary.run.trace
    if not trace.holdings:
        return caption(
            "What the chosen rank holds over time, in microbatches of a whole stage: this trace has counted no bytes."
        )
    owners = list(dict.fromkeys(owner for rank in summary.held for owner in rank))
    rows = [
        [f"rank {rank}", *(format_bytes(held.get(owner, 0.0)) for owner in owners), format_bytes(sum(held.values()))]
        for rank, held in enumerate(summary.held)
    ]
    limit = summary.run.memory_bytes
    room = "" if limit is None else f" A device has {format_bytes(limit)}."
    return (
        caption("What the chosen rank holds over time, owner upon owner.")
        + table(["", *map(words, owners), "together"], rows)
        + caption(f"Owners of the bytes at the fullest moment of each rank.{room}", of="table")
    )


def findings(found: Sequence[Finding], summary: Summary) -> str:
    """Return the findings of the doctor."""
    if not found:
        return '<p class="none">Nothing was found to hold this run up.</p>'
    return "\n".join(_finding(each, summary) for each in found)


def _finding(finding: Finding, summary: Summary) -> str:
    whole = summary.step_seconds
    gain = finding.about
    if finding.gain_seconds is not None and whole > 0:
        share = finding.gain_seconds / whole
        gain = f"predicted gain {summary.run.time(finding.gain_seconds)}, {format_percent(share)} of the step"
    grave = " grave" if finding.gain_seconds is not None and finding.gain_seconds > 0.05 * whole else ""
    return (
        f'<div class="finding{grave}"><h3>{words(finding.problem)}</h3><p>{words(finding.evidence)}</p>'
        f'<p>Try <code>{words(finding.fix)}</code></p><p class="gain">{words(gain)}</p></div>'
    )


def plan(summary: Summary) -> str:
    """Return the plan with its reasons, and the environment of the run."""
    run = summary.run
    rows = [[f"<code>{words(each.key)}</code>", words(each.value), words(each.reason)] for each in run.plan]
    told = (
        table(["key", "value", "reason"], rows, in_words=(0, 1, 2)) if rows else '<p class="none">No plan is known.</p>'
    )
    facts = [[words(key.replace("_", " ")), words(value)] for key, value in run.facts.items()]
    return told + (table(["", "of the run"], facts, in_words=(0, 1)) if facts else "")


def lead(summary: Summary) -> str:
    """Return the line under the title."""
    run, trace = summary.run, summary.run.trace
    plan_text = ",".join(f"{each.key}={each.value}" for each in run.plan)
    num_microbatches = len({event.microbatch for rank in trace.compute for event in rank})
    told = [
        "Measured" if trace.is_measured else "Predicted",
        f"schedule {trace.name}",
        counted(run.num_ranks, "rank"),
        counted(num_microbatches, "microbatch"),
        *([f"plan {plan_text}"] if plan_text else []),
    ]
    return words(" \N{MIDDLE DOT} ".join(told))


def share_of(seconds: float, whole: float) -> str:
    """Return a share in per cent; a dash for none."""
    return format_percent(seconds / whole) if whole > 0 and seconds > 0 else "\N{EN DASH}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, in_words: Sequence[int] = ()) -> str:
    """Return a table of cells that are HTML already. Columns `in_words` are text, not numbers to compare."""
    kinds = [' class="words"' if place in in_words else "" for place in range(len(head))]
    top = "".join(f"<th{kind} scope=col>{cell}</th>" for cell, kind in zip(head, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table class="data"><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def caption(text: str, *, of: str = "figure") -> str:
    """Return the caption of a figure or a table. The style sheet numbers them."""
    return f'<p class="caption"><b class="{of}"></b> {text}</p>'


def change_of(before: float, after: float, *, more_is_worse: bool = True) -> str:
    """Return a change, coloured by whether it is an improvement."""
    if before == after:
        return "same"
    if before <= 0:
        return "new"
    change = after / before - 1
    if abs(change) < 0.0005:
        return "same"
    kind = "worse" if (change > 0) == more_is_worse else "better"
    sign = "+" if change > 0 else "\N{MINUS SIGN}"
    return f'<span class="{kind}">{sign}{abs(change) * 100:.1f} %</span>'
