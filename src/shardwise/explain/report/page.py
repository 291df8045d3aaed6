"""One HTML file that holds everything: style, script and data. It opens from a disk, and asks nothing of a network."""

import json
from collections.abc import Mapping, Sequence
from html import escape as words
from importlib.resources import files

from shardwise.explain.doctor.case import Finding
from shardwise.explain.report import sections
from shardwise.explain.report.comparison import comparison
from shardwise.explain.report.encode import ACTIVITY_KINDS, LANES, PARTS, encode
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
    "start.js",
)


def make_page(run: Run, other: Run | None = None, *, found: Sequence[Finding] = ()) -> str:
    """Return the text of the page. `other` is drawn beneath `run` and compared with it."""
    summary = Summary(run)
    second = None if other is None else Summary(other)
    title = run.name if other is None else f"{run.name} and {other.name}"
    return _filled(
        _asset("page.html"),
        {
            "title": words(title),
            "style": "\n".join(map(_asset, _STYLES)),
            "lead": sections.lead(summary),
            "figures": sections.figures(summary),
            "timeline_caption": _timeline_caption(run, other),
            "parts": sections.parts(summary, second),
            "streams": sections.streams(summary),
            "memory": sections.memory(summary),
            "comparison": "" if second is None else comparison(summary, second),
            "findings": sections.findings(found, summary),
            "plan": sections.plan(summary),
            "footer": "Made by Shardwise. The same trace opens in ui.perfetto.dev.",
            "data": _data(summary, second),
            "script": "\n".join(map(_asset, _SCRIPTS)),
        },
    )


def _asset(name: str) -> str:
    return (files("shardwise.explain.report") / "assets" / name).read_text(encoding="utf-8")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """The template with each `@name@` replaced, once: what is put in is not looked through."""
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
    kind = "was measured to do" if run.trace.is_measured else "is predicted to do"
    text = f"What each rank {kind}. Numbers are microbatches; hatched is a rank that stands still."
    if run.trace.activities:
        text += " Beneath each, the streams of its GPU: from afar, as high as a stream was busy."
    return text + (f" Beneath each row, thinner: {' or '.join(beneath)}." if beneath else "")


def _data(summary: Summary, second: Summary | None) -> str:
    run = summary.run
    label = "measured" if run.trace.is_measured else "predicted"
    traces = [{**encode(run.trace, summary.cut, label=label), "peaks": summary.peaks}]
    if second is not None:
        traces.append(encode(second.run.trace, second.cut, label=second.run.name))
    if run.predicted is not None:
        traces.append(encode(run.predicted, stretches(run.predicted), label="predicted"))
    data = {
        "unit": run.unit,
        "heldUnit": "B" if run.trace.holdings else "",
        "lanes": LANES,
        "kinds": ACTIVITY_KINDS,
        "parts": [{"key": sections.KEYS[part], "name": str(part)} for part in PARTS],
        "traces": traces,
    }
    # `</script>` in a name would end the element that the data is in.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
