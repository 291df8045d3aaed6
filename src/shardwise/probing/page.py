"""The HTML page of a probe: findings, heat maps of every pair, curves of every collective. It needs no script."""

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from shardwise.cluster.curve import COLLECTIVES, Curve
from shardwise.cluster.pairs import Pairs
from shardwise.cluster.probe import Probe
from shardwise.probing.words import findings, title
from shardwise.units import format_bytes, format_flops, format_seconds

_STYLE = """
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--ground); }
h1 { font-size: 1.2rem; } h2 { font-size: 1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--rule); }
figure { display: inline-block; margin: 1rem 1rem 0 0; vertical-align: top; } figcaption { color: var(--faint); }
text { font-size: 10px; fill: var(--faint); } .on { fill: var(--on-box); }
path { fill: none; stroke-width: 1.6; } line { stroke: var(--rule); } .slow { stroke: var(--found); stroke-width: 2; }
li { margin: .3rem 0; }
"""
_CELL, _EDGE = 34, 40
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 220, 60, 40
_INKS = ("--F", "--B", "--I", "--W", "--S", "--exposed")


def make_probe_page(probe: Probe) -> str:
    """Make a self-contained file."""
    colours = (files("shardwise.explain.report") / "assets" / "colours.css").read_text(encoding="utf-8")
    name = title(probe)
    found = "".join(f"<li>{escape(each)}</li>" for each in findings(probe))
    parts = [f"<h1>{escape(name)}</h1><ul>{found}</ul>"]
    if probe.devices[0].flops_per_second:
        parts.append(f"<h2>Devices</h2>{_devices(probe)}")
    if probe.pairs is not None:
        parts.append("<h2>Every pair: from the row's device to the column's</h2>" + _maps(probe, probe.pairs))
    if probe.curves:
        parts.append("<h2>Collectives: bus bandwidth by size</h2>" + "".join(_charts(probe.curves)))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f'<link rel="icon" href="data:,"><style>{colours}{_STYLE}</style></head><body>{"".join(parts)}</body></html>\n'
    )


def _devices(probe: Probe) -> str:
    kinds = list(probe.devices[0].flops_per_second)
    head = ["device", *(f"{kind} matmul" for kind in kinds), "copy", "to device", "to host", "both, each", "disk"]
    rows = []
    for each in probe.devices:
        rates = (each.copied, each.to_device, each.to_host, each.both_ways, each.disk_read)
        cells = [each.name, *(f"{format_flops(each.flops_per_second[kind])}/s" for kind in kinds)]
        cells += [rate_text(rate) for rate in rates]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{''.join(rows)}</table>"


def rate_text(rate: float) -> str:
    return f"{format_bytes(rate, decimal=True)}/s" if rate else "-"


def _maps(probe: Probe, pairs: Pairs) -> str:
    slow = {(each.sender, each.receiver) for each in probe.slow_links()}
    rates = [[rate / 1e9 for rate in row] for row in pairs.bytes_per_second]
    latencies = [[seconds * 1e6 for seconds in row] for row in pairs.latency_seconds]
    names = [f"{number}: {pairs.name(number)}" for number in range(pairs.num_devices)]
    return (
        _heat_map("GB/s (darker is faster)", rates, slow, names)
        + _heat_map("latency, µs (darker is longer)", latencies, slow, names)
        + f"<p>{escape('; '.join(names))}</p>"
    )


def _heat_map(caption: str, rows: Sequence[Sequence[float]], slow: set[tuple[int, int]], names: Sequence[str]) -> str:
    """Draw a square of cells, colored by the logarithm of their numbers; slow links are framed."""
    count = len(rows)
    values = [value for i, row in enumerate(rows) for j, value in enumerate(row) if i != j and value > 0]
    low, high = math.log(min(values)), math.log(max(values))
    size = _EDGE + _CELL * count
    drawn = []
    for i, row in enumerate(rows):
        place = _EDGE + i * _CELL + _CELL / 2 + 4
        drawn.append(f'<text x="{_EDGE - 6}" y="{place}" text-anchor="end">{i}</text>')
        drawn.append(f'<text x="{place - 4}" y="{_EDGE - 6}" text-anchor="middle">{i}</text>')
        for j, value in enumerate(row):
            if i == j or value <= 0:
                continue
            share = 1.0 if high - low < 1e-9 else (math.log(value) - low) / (high - low)
            mark = ' class="slow"' if (i, j) in slow else ""
            x, y = _EDGE + j * _CELL, _EDGE + i * _CELL
            said = escape(f"{names[i]} to {names[j]}: {value:.3g}")
            drawn.append(
                f'<g><title>{said}</title><rect x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_CELL - 2}"'
                f' fill="var(--F)" fill-opacity="{0.15 + 0.85 * share:.2f}"{mark}/>'
                f'<text class="on" x="{x + _CELL / 2}" y="{y + _CELL / 2 + 4}" text-anchor="middle">{value:.2g}'
                "</text></g>"
            )
    body = "".join(drawn)
    return (
        f'<figure><svg width="{size}" height="{size}" viewBox="0 0 {size} {size}">{body}</svg>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _charts(curves: Sequence[Curve]) -> list[str]:
    kinds = dict.fromkeys((curve.scope, curve.num_devices) for curve in curves)
    return [_chart([curve for curve in curves if (curve.scope, curve.num_devices) == kind]) for kind in kinds]


def _chart(curves: Sequence[Curve]) -> str:
    """Draw bus bandwidth over size, both logarithmic, with a line for each collective."""
    rates = [rate for curve in curves for rate in curve.bus_rates()]
    sizes = [size for curve in curves for size in curve.sizes]
    low, high = math.log10(min(rates)), math.log10(max(rates)) + 0.05
    left, right = math.log2(min(sizes)), math.log2(max(sizes))

    def at(size: float, rate: float) -> str:
        x = _LEFT + (math.log2(size) - left) / max(right - left, 1e-9) * (_WIDTH - _LEFT - 10)
        y = _HEIGHT - _BOTTOM - (math.log10(rate) - low) / max(high - low, 1e-9) * (_HEIGHT - _BOTTOM - 20)
        return f"{x:.1f},{y:.1f}"

    drawn, named = [], []
    for curve in curves:
        ink = _INKS[COLLECTIVES.index(curve.collective)]
        points = " L".join(at(size, rate) for size, rate in zip(curve.sizes, curve.bus_rates(), strict=True))
        drawn.append(f'<path d="M{points}" stroke="var({ink})"/>')
        fit = curve.fit()
        named.append(
            f'<span style="color:var({ink})">&#9632;</span> {curve.collective} {rate_text(fit.bytes_per_second)}'
            f" + {format_seconds(fit.latency_seconds)}"
        )
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        y = at(min(sizes), 10**exponent).partition(",")[2]
        drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{_LEFT - 4}" y="{y}" text-anchor="end">{rate_text(10.0**exponent)}</text>')
    ends = ((min(sizes), "start"), (max(sizes), "end"))
    for size, anchor in ends:
        x = at(size, max(rates)).partition(",")[0]
        drawn.append(f'<text x="{x}" y="{_HEIGHT - 20}" text-anchor="{anchor}">{format_bytes(size)}</text>')
    caption = f"{curves[0].scope}, groups of {curves[0].num_devices}<br>{'<br>'.join(named)}"
    return (
        f'<figure><svg width="{_WIDTH}" height="{_HEIGHT}">{"".join(drawn)}</svg>'
        f"<figcaption>{caption}</figcaption></figure>"
    )
