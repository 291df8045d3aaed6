"""One self-contained HTML file with style, script and data. It opens from disk and needs no network."""

import json
from collections.abc import Mapping, Sequence
from html import escape as words
from importlib.resources import files

from shardwise.explain.doctor.case import Finding
from shardwise.explain.report import requests, sections
from shardwise.explain.report.comparison import comparison, headline
from shardwise.explain.report.curves import curves
from shardwise.explain.report.encode import ACTIVITY_KINDS, LANES, PARTS, encode
from shardwise.explain.report.history import history
from shardwise.explain.summary import Summary
from shardwise.trace.run import Run
from shardwise.trace.stretches import stretches

_STYLES = ("colours.css", "page.css", "tables.css")
# In the order in which they build on each other.
_SCRIPTS = (
    "decode.js",
    "words.js",
    "theme.js",
    "view.js",
    "boxes.js",
    "streams.js",
    "timeline.js",
    "overview.js",
    "details.js",
    "search.js",
    "memory.js",
    "curves.js",
    "start.js",
)


def make_page(
    run: Run, other: Run | None = None, *, found: Sequence[Finding] = (), other_found: Sequence[Finding] = ()
) -> str:
    """Return the text of the page. `other` is drawn beneath `run` and compared with it."""
    summary = Summary(run)
    second = None if other is None else Summary(other)
    of_requests = run.is_of_requests and other is None
    title = run.name if other is None else f"{run.name} and {other.name}"
    return _filled(
        _asset("page.html"),
        {
            "title": words(title),
            "style": "\n".join(map(_asset, _STYLES)),
            "lead": requests.lead(run)
            if of_requests
            else sections.lead(summary)
            if second is None
            else headline(summary, second),
            "figures": requests.figures(run) if of_requests else sections.figures(summary, second),
            "timeline_caption": _timeline_caption(run, other),
            "parts_head": "Where the time went" if of_requests else "Where the step went",
            "parts": requests.parts(run) if of_requests else sections.parts(summary, second),
            "hidden": " hidden" if of_requests else "",
            "streams": sections.streams(summary),
            "memory": sections.memory(summary),
            "comparison": "" if second is None else comparison(summary, second),
            "findings": _findings(summary, found, second, other_found),
            "history": history(run) if other is None else "",
            "curves": curves(run, other),
            "plan": sections.plan(summary) if second is None else _plans(summary, second),
            "footer": "Made by Shardwise. The same trace opens in ui.perfetto.dev.",
            "data": _data(summary, second),
            "script": "\n".join(map(_asset, _SCRIPTS)),
        },
    )


def _findings(
    summary: Summary, found: Sequence[Finding], second: Summary | None, other_found: Sequence[Finding]
) -> str:
    """Return the findings; of two runs, each under its name."""
    if second is None:
        return sections.findings(found, summary)
    told = ((summary, found), (second, other_found))
    return "".join(f'<h3 class="of">{words(each.run.name)}</h3>{sections.findings(mine, each)}' for each, mine in told)


def _plans(*summaries: Summary) -> str:
    return "".join(f'<h3 class="of">{words(each.run.name)}</h3>{sections.plan(each)}' for each in summaries)


def _asset(name: str) -> str:
    return (files("shardwise.explain.report") / "assets" / name).read_text(encoding="utf-8")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Return the template with each `@name@` replaced once; inserted text is not searched."""
    filled = []
    for place, piece in enumerate(template.split("@")):
        filled.append(values[piece] if place % 2 else piece)
    return "".join(filled)


def _timeline_caption(run: Run, other: Run | None) -> str:
    beneath = []
    if run.predicted is not None:
        beneath.append("the step as it was predicted")
    if other is not None:
        beneath.append(words(other.name))
    if run.is_of_requests:
        return (
            "A row is a request: its prompt and its tokens as it is computed, and what it waited for."
            " Hatched is the time before it came and after it was answered."
        )
    kind = "was measured to do" if run.trace.is_measured else "is predicted to do"
    text = f"What each rank {kind}. Numbers are microbatches; hatched is a rank that stands still."
    if run.unit == "F":
        text += " Times are in F, the forward of a microbatch on an average stage."
    if run.alike:
        text += f" {run.num_ranks} ranks: a row is one of {len(run.alike[0])} that do the same, named by the first."
    if run.trace.activities:
        text += (
            " Beneath each, the streams of its GPU, by what they mostly did and their number: from afar, as high as a"
            " stream was busy. Hatched at the foot of a box: the GPU stands still inside of it."
        )
    return text + (f" Beneath each row, thinner: {' or '.join(beneath)}." if beneath else "")


def _data(summary: Summary, second: Summary | None) -> str:
    run = summary.run
    label = "measured" if run.trace.is_measured else "predicted"
    traces = [{**encode(run.trace, summary.cut, label=label, rank_name=run.rank_name), "peaks": summary.peaks}]
    if second is not None:
        other = second.run
        traces.append(encode(other.trace, second.cut, label=other.name, rank_name=other.rank_name))
    if run.predicted is not None:
        cut = stretches(run.predicted)
        traces.append(encode(run.predicted, cut, label="predicted", rank_name=run.rank_name))
    data = {
        "unit": run.unit,
        "heldUnit": "B" if run.trace.holdings else "microbatches",
        "alike": run.alike,
        "lanes": LANES,
        "kinds": ACTIVITY_KINDS,
        "parts": [{"key": sections.KEYS[part], "name": str(part)} for part in PARTS],
        "traces": traces,
    }
    # `</script>` in a name would end the element that the data is in.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
