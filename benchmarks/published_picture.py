"""Draws predicted against measured step times of published runs: `docs/pictures/predictions.svg`, one point a run.

python benchmarks/published_picture.py RUNS.csv
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from math import ceil, floor, log10
from pathlib import Path

from published import runs_asked_for, timed

from shardwise.planner.validate import Prediction

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "predictions.svg"
#: Who published, in words. The others are named as in the table.
SOURCES = {
    "aleph": "Aleph Alpha, A100",
    "bridge": "Megatron-Bridge, H100 to GB300",
    "llmf": "llm-foundry, A100 and H100",
    "bloom": "BLOOM, A100",
    "zb": "zero bubble, A100",
    "sc21": "Megatron-LM 2021, A100",
    "bcard": "Megatron-Bridge cards",
    "bskill": "Megatron-Bridge guides",
    "korth": "Korthikanti 2022, A100",
}
# Colours that tell each other apart on white and on black, also for most who see few of them.
COLOURS = ("#4477dd", "#dd6644", "#22a07a", "#b455c8", "#c99a1a", "#2fa8c4", "#d0508a", "#7a8a2a", "#8a6a4a", "#888888")
_SIZE, _LEFT, _TOP, _LEGEND = 460.0, 70.0, 72.0, 250.0

_STYLE = """
text { font-family: ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif;
       font-size: 12px; fill: #1d2733; }
.title { font-size: 16px; font-weight: 600; }
.faint { fill: #6b7785; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.rule { stroke: #e3e7ec; stroke-width: 1; }
.equal { stroke: #6b7785; stroke-width: 1.2; }
.near { stroke: #6b7785; stroke-width: 0.8; stroke-dasharray: 4 4; }
.page { fill: #ffffff; stroke: #e3e7ec; }
circle { fill-opacity: 0.62; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .faint { fill: #9aa5b1; }
  .rule { stroke: #2b333c; }
  .equal, .near { stroke: #9aa5b1; }
  .page { fill: #0d1117; stroke: #2b333c; }
  circle { fill-opacity: 0.8; }
}
"""


def draw(predictions: Sequence[Prediction]) -> str:
    """The picture, as the text of a file."""
    sources: dict[str, list[Prediction]] = defaultdict(list)
    for each in predictions:
        sources[each.run.source].append(each)
    ordered = sorted(sources.items(), key=lambda item: -len(item[1]))
    times = [time for each in predictions for time in (each.seconds, each.run.step_seconds or each.seconds)]
    low, high = floor(2 * log10(min(times))) / 2, ceil(2 * log10(max(times))) / 2

    def place(seconds: float) -> float:
        return (log10(seconds) - low) / (high - low) * _SIZE

    def point(measured: float, predicted: float) -> tuple[float, float]:
        return _LEFT + place(measured), _TOP + _SIZE - place(predicted)

    width, height = _LEFT + _SIZE + _LEGEND + 24, _TOP + _SIZE + 58
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img">',
        "<title>Predicted against measured step times of published training runs</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="10"/>',
        f'<text class="title" x="24" y="32">{len(predictions)} published training steps, predicted and measured</text>',
        '<text class="faint" x="24" y="50">quality A; constants were chosen on these runs, none for one source</text>',
        *_axes(low, high, point),
    ]
    for colour, (_, runs) in zip(_colours(len(ordered)), ordered, strict=True):
        lines.append(f'<g fill="{colour}">')
        for each in runs:
            x, y = point(each.run.step_seconds or each.seconds, each.seconds)
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
        lines.append("</g>")
    lines += [*_legend(ordered), "</svg>"]
    return "\n".join(lines) + "\n"


def _axes(low: float, high: float, point: object) -> list[str]:
    """Decades with their halves, the line of equal times, and a tenth to both sides of it."""
    assert callable(point)
    lines = []
    least, most = 10**low, 10**high
    ticks = [value for power in range(floor(low), ceil(high) + 1) for value in (10.0**power, 3 * 10.0**power)]
    for value in (tick for tick in ticks if least <= tick <= most):
        x, y = point(value, value)
        text = f"{value:g} s"
        lines += [
            f'<line class="rule" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + _SIZE}"/>',
            f'<line class="rule" x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _SIZE}" y2="{y:.1f}"/>',
            f'<text class="faint middle" x="{x:.1f}" y="{_TOP + _SIZE + 18}">{text}</text>',
            f'<text class="faint end" x="{_LEFT - 8}" y="{y + 4:.1f}">{text}</text>',
        ]
    for kind, factor in (("equal", 1.0), ("near", 1.1), ("near", 1 / 1.1)):
        begin, end = max(least, least / factor), min(most, most / factor)
        (x1, y1), (x2, y2) = point(begin, begin * factor), point(end, end * factor)
        lines.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    lines.append(
        f'<text class="middle" x="{_LEFT + _SIZE / 2}" y="{_TOP + _SIZE + 42}">measured, seconds of a step</text>'
    )
    middle = _TOP + _SIZE / 2
    lines.append(f'<text class="middle" x="20" y="{middle}" transform="rotate(-90 20 {middle})">predicted</text>')
    return lines


def _legend(ordered: Sequence[tuple[str, list[Prediction]]]) -> list[str]:
    """Each source with its number of runs and its mean error."""
    x, lines = _LEFT + _SIZE + 24, []
    for number, (colour, (source, runs)) in enumerate(zip(_colours(len(ordered)), ordered, strict=True)):
        y = _TOP + 14 + number * 38
        error = sum(abs(each.time_error or 0.0) for each in runs) / len(runs)
        lines += [
            f'<circle cx="{x + 5}" cy="{y - 4}" r="5" fill="{colour}"/>',
            f'<text x="{x + 18}" y="{y}">{SOURCES.get(source, source)}</text>',
            f'<text class="faint" x="{x + 18}" y="{y + 15}">{len(runs)} runs, {100 * error:.1f} % off on average'
            "</text>",
        ]
    y = _TOP + _SIZE
    lines.append(f'<text class="faint" x="{x}" y="{y}">dashed: a tenth more, a tenth less</text>')
    return lines


def _colours(count: int) -> list[str]:
    return [COLOURS[min(number, len(COLOURS) - 1)] for number in range(count)]


def main() -> int:
    runs = runs_asked_for()
    if not runs:
        return 0
    predictions = timed(runs)
    PICTURE.write_text(draw(predictions), encoding="utf-8")
    print(f"{len(predictions)} points in {PICTURE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
