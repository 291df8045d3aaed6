"""The HTML page of a benchmark: a table, and curves that need no script."""

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise

from shardwise.serving.client.bench_run import Measured
from shardwise.units import format_number, format_seconds

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 420, 200, 62, 34, 26, 12
_STYLE = """
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--ground); }
h1 { font-size: 1.2rem; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--rule); }
figure { display: inline-block; margin: 1rem 1rem 0 0; } svg { width: 420px; }
text { font-size: 11px; fill: var(--faint); }
path { fill: none; stroke: var(--accent); stroke-width: 1.6; } circle { fill: var(--accent); }
line { stroke: var(--rule); } .title { fill: var(--ink); font-weight: 600; }
"""
Points = Sequence[tuple[float, float]]


def make_bench_page(title: str, measured: Sequence[Measured]) -> str:
    """Make one file. With several rates, curves are over rates; otherwise over the requests of the one."""
    colours = (files("shardwise.explain.report") / "assets" / "colours.css").read_text(encoding="utf-8")
    charts = _over_rates(measured) if len(measured) > 1 else _of_one(measured[0])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{colours}{_STYLE}</style></head><body><h1>{escape(title)}</h1>'
        f"{_table(measured)}{''.join(charts)}</body></html>\n"
    )


def _table(measured: Sequence[Measured]) -> str:
    names = ("rate", "requests", "refused", "output tokens/s", "first token p50", "p99", "between tokens p50", "p99")
    rows = []
    for each in measured:
        found = each.figures()
        first, between = found["first_token_seconds"], found["between_tokens_seconds"]
        cells = [
            rate_text(each.rate), str(found["num_requests"]), str(found["num_refused"]),
            f"{found['output_tokens_per_second']:,.0f}",
            *(format_seconds(part[name]) if part else "-" for part in (first, between) for name in ("p50", "p99")),
        ]  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def rate_text(rate: float | None) -> str:
    return "all at once" if rate is None else f"{format_number(rate, 4)} a second"


def _over_rates(measured: Sequence[Measured]) -> list[str]:
    at = [each.figures() for each in measured]
    reached = [figures["requests_per_second"] for figures in at]

    def curve(read: Callable[[dict[str, object]], float]) -> Points:
        return sorted(zip(reached, map(read, at), strict=True))

    over = "requests answered a second"
    return [
        _chart("output tokens a second", over, curve(lambda each: float(str(each["output_tokens_per_second"])))),
        _chart("time to the first token, median", over, curve(lambda each: _median(each, "first_token_seconds")), "s"),
        _chart("between tokens, median", over, curve(lambda each: _median(each, "between_tokens_seconds")), "s"),
    ]


def _median(figures: dict[str, object], name: str) -> float:
    found = figures[name]
    return float(found["p50"]) if isinstance(found, dict) else 0.0


def _of_one(measured: Measured) -> list[str]:
    firsts = [each.first for each in measured.answered]
    between = [gap for each in measured.answered for gap in each.between]
    return [
        _chart("output tokens a second", "seconds of the run", _rates(measured)),
        _chart("time to the first token", "part of the requests, %", _ranked(firsts), "s"),
        _chart("between tokens", "part of the tokens, %", _ranked(between), "s"),
    ]


def _rates(measured: Measured) -> Points:
    """Return tokens per second, in 40 intervals of the run."""
    width = measured.seconds / 40 or 1.0
    counts = [0] * 40
    for each in measured.answered:
        for at in each.tokens:
            counts[min(39, int(at / width))] += 1
    return [((place + 0.5) * width, count / width) for place, count in enumerate(counts)]


def _ranked(values: Sequence[float]) -> Points:
    ranked = sorted(values)
    step = max(1, len(ranked) // 200)
    return [(100 * (place + 1) / len(ranked), ranked[place]) for place in range(0, len(ranked), step)]


def _chart(title: str, over: str, points: Points, unit: str = "") -> str:
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    left, right, top = min(xs), max(xs), max(ys) or 1.0

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * ((value - left) / (right - left) if right > left else 0.5)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / top

    drawn = [f'<text class="title" x="{_LEFT}" y="14">{escape(title)}{f", {unit}" if unit else ""}</text>']
    for part in (0.0, 0.5, 1.0):
        at = y(top * part)
        drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{format_number(top * part, 3)}</text>')
    for value in sorted({left, right}):
        drawn.append(
            f'<text x="{x(value):.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{format_number(value, 3)}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn.append(f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(over)}</text>')
    drawn += [f'<path d="M{x(a):.1f} {y(b):.1f}L{x(c):.1f} {y(d):.1f}"/>' for (a, b), (c, d) in pairwise(points)] or [
        f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>' for a, b in points
    ]
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)} over {escape(over)}">'
        f"{''.join(drawn)}</svg></figure>"
    )
