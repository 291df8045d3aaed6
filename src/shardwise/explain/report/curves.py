"""The curves of a training run (loss, throughput and other metrics), as static SVG without scripts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape as words
from itertools import groupby
from math import floor, log10
from typing import NamedTuple

from shardwise.explain.report.sections import caption
from shardwise.trace.metrics import Curve
from shardwise.trace.run import Run
from shardwise.units import format_number

#: Points of a curve that are drawn. Of more, each is the mean of those that fall together.
_MOST_POINTS = 400
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 380, 170, 58, 12, 26, 34
_GIB = 2**30


class Chart(NamedTuple):
    """One chart: its metrics with their labels, the unit of its axis, and the divisor of values."""

    title: str
    metrics: Mapping[str, str]
    unit: str = ""
    divided_by: float = 1.0
    from_zero: bool = False


CHARTS = (
    Chart("Loss", {"loss": "training", "held_out_loss": "held out"}, "loss"),
    Chart("Throughput", {"tokens_per_second": "tokens/s"}, "tokens/s", from_zero=True),
    Chart("Learning rate", {"rate": "rate"}, "rate", from_zero=True),
    Chart("Norm of the gradients", {"gradient_norm": "before clipping"}, "norm", from_zero=True),
    Chart("Memory of the fullest rank", {"memory_bytes": "held at most"}, "GiB", _GIB, from_zero=True),
    Chart("Model FLOPs utilisation", {"mfu": "MFU"}, "%", 0.01, from_zero=True),
    Chart("Load of the fullest expert", {"expert_imbalance": "times the mean"}, "times", from_zero=True),
)


def curves(run: Run, other: Run | None = None) -> str:
    """Return the section of a training run, as HTML; empty if no metrics were recorded."""
    runs = [each for each in (run, other) if each is not None]
    shown = [chart for chart in CHARTS if any(key in each.curves for each in runs for key in chart.metrics)]
    if not shown:
        return ""
    pictures = "".join(_picture(chart, runs) for chart in shown)
    many = max(len(curve) for each in runs for curve in each.curves.values())
    text = "What was noted while it trained, over the steps of the run."
    if other is not None:
        text += f" Dashed: {words(other.name)}."
    if many > _MOST_POINTS:
        text += f" Of more than {_MOST_POINTS} steps a point is the mean of its neighbours."
    return (
        '<section id="training" aria-labelledby="training-head"><h2 id="training-head">Training</h2>'
        f'<div class="charts">{pictures}</div>{caption(text)}</section>'
    )


class _Line(NamedTuple):
    name: str
    points: Curve
    kind: str


def _picture(chart: Chart, runs: Sequence[Run]) -> str:
    lines = [
        _Line(_name(chart, word, run, runs), _thinned(run.curves[key], chart.divided_by), _kind(number, place))
        for place, run in enumerate(runs)
        for number, (key, word) in enumerate(chart.metrics.items())
        if key in run.curves
    ]
    steps = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    low, high = (min(0.0, *values) if chart.from_zero else min(values)), max(values)
    ticks = _ticks(low, high if high > low else low + (abs(low) or 1.0))
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    x = _scale(min(steps), max(steps), _LEFT, _WIDTH - _RIGHT)
    y = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    last = ", ".join(f"{line.name} {format_number(line.points[-1][1], 4)} at the end" for line in lines)
    legend = "".join(f'<span><i class="{line.kind}"></i>{words(line.name)}</span>' for line in lines)
    drawn = _axes(chart, ticks, steps, x, y) + "".join(_path(line, x, y) for line in lines)
    return (
        f'<figure class="chart"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{words(f"{chart.title} in {chart.unit} over steps: {last}")}">{drawn}</svg>'
        f'<div class="legend">{legend if len(lines) > 1 else ""}</div></figure>'
    )


def _name(chart: Chart, word: str, run: Run, runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return word
    return f"{run.name}, {word}" if len(chart.metrics) > 1 else run.name


def _kind(number: int, place: int) -> str:
    return f"line-{number}" + (" second" if place else "")


def _thinned(curve: Curve, divided_by: float) -> Curve:
    bucket = -(-len(curve) // _MOST_POINTS)
    parts = [curve[at : at + bucket] for at in range(0, len(curve), bucket)]
    return tuple((part[-1][0], sum(value for _, value in part) / len(part) / divided_by) for part in parts)


def _axes(chart: Chart, ticks: Sequence[float], steps: Sequence[int], x: "_Scale", y: "_Scale") -> str:
    drawn = [f'<text class="title" x="{_LEFT}" y="13">{chart.title}</text>']
    for tick in ticks:
        at = y(tick)
        drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        drawn.append(f'<text class="y" x="{_LEFT - 6}" y="{at + 3.5:.1f}">{_tick_text(tick)}</text>')
    drawn.append(f'<text class="y unit" x="{_LEFT - 6}" y="13">{chart.unit}</text>')
    for step in _steps_shown(min(steps), max(steps)):
        drawn.append(f'<text class="x" x="{x(step):.1f}" y="{_HEIGHT - 18}">{step}</text>')
    drawn.append(f'<text class="x unit" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}">step</text>')
    return "".join(drawn)


def _path(line: _Line, x: "_Scale", y: "_Scale") -> str:
    """Return one line; a single point is a dot. Each shows its numbers on hover."""
    if len(line.points) == 1:
        ((step, value),) = line.points
        return f'<circle class="{line.kind}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5"/>'
    told = "".join(f"{'L' if at else 'M'}{x(step):.1f} {y(value):.1f}" for at, (step, value) in enumerate(line.points))
    data = " ".join(f"{step}:{value:.6g}" for step, value in line.points)
    return f'<path class="{line.kind}" d="{told}" data-points="{data}" data-name="{words(line.name)}"/>'


_Scale = Callable[[float], float]


def _scale(low: float, high: float, begin: float, end: float) -> _Scale:
    return lambda value: begin + (end - begin) * ((value - low) / (high - low) if high > low else 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from the one at or below `low` to the one at or above `high`."""
    least = (high - low) / 4
    power = 10.0 ** floor(log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
    first, last = floor(low / step + 1e-9), -floor(-high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def _steps_shown(first: int, last: int) -> Iterable[int]:
    """First and last, and the round ones between that are not too near to them."""
    if last - first < 2:
        return sorted({first, last})
    inner = [round(each) for each in _ticks(first, last)]
    room = (last - first) / 8
    shown = [first, *(each for each in inner if first + room < each < last - room), last]
    return [step for step, _ in groupby(shown)]


def _tick_text(value: float) -> str:
    """Short: 12k, 1.5M, 3e-4."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"
