"""A run over time, as a static picture without scripts: when ranks ran and why they ended, checkpoints, copies, slow
ranks, corrupt values, and the loss below."""

from collections.abc import Callable, Iterator, Sequence
from html import escape as words

from shardwise.explain.report.sections import caption, table
from shardwise.trace.history import History, Period, Start
from shardwise.trace.run import Run
from shardwise.units import counted, format_number, format_seconds

_WIDTH, _LEFT, _RIGHT = 1120, 92, 14
_ROW, _BAR, _LOSS = 22, 14, 110
#: Times on the axis, in seconds: as few as there are at least four of.
_STEPS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800)
_MOST_TICKS = 12
_Scale = Callable[[float], float]
#: More marks of a kind than this cannot be told from each other.
_MOST_MARKS = 400


def history(run: Run) -> str:
    """Return the section, as HTML; empty if the run has no journal."""
    told = run.history
    if told is None:
        return ""
    text = (
        "The run over time. A bar is one time that ranks were started, red where it ended early; point at it for why."
        " Beneath are checkpoints, copies in memory, ranks that were slow, and the loss."
    )
    if told.jumped >= 1:
        back = format_seconds(told.jumped)
        text += f" A clock went back by {back} meanwhile: what was noted then stands where the line before it does."
    rows = table(("started", "from step", "to step", "hosts", "ended"), map(_row, told.starts), in_words=(0, 3, 4))
    return (
        '<section id="run" aria-labelledby="run-head"><h2 id="run-head">The run</h2>'
        f'<figure class="chart run">{_picture(told)}</figure>{caption(text)}{rows}</section>'
    )


def _row(start: Start) -> tuple[str, ...]:
    step = "\N{EN DASH}" if start.end_step is None else str(start.end_step)
    hosts = ", ".join(f"{host} ({counted(len(ranks), 'rank')})" for host, ranks in start.hosts.items())
    source = "" if start.source is None else f" ({words(start.source)})"
    return words(start.when), f"{start.step}{source}", step, words(hosts), words(start.why or "it runs")


def _picture(told: History) -> str:
    whole = max(told.seconds, 1e-3)

    def x(seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(max(seconds, 0.0), whole) / whole

    lanes: list[tuple[str, list[str]]] = [("ranks ran", list(_bars(told.ran, whole, x, "ran")))]
    for name, marks, kind in (("checkpoints", told.saved, "saved"), ("copies", told.copied, "copied")):
        shown = marks[:: -(-len(marks) // _MOST_MARKS)] if marks else ()
        if shown:
            lanes.append((name, [_mark(x(time), f"step {step}", kind) for time, step in shown]))
    for text in dict.fromkeys(each.text for each in told.slow):
        mine = [each for each in told.slow if each.text == text]
        lanes.append(("slow", [*_bars(mine, whole, x, "slow"), _label(x(mine[0].begin), text)]))
    if told.corrupt:
        lanes.append(("wrong", [_mark(x(time), text, "corrupt") for time, text in told.corrupt]))
    top = len(lanes) * _ROW + 10
    bottom = top + (_LOSS if len(told.losses) > 1 else 0)
    drawn = _axis(whole, x, bottom)
    for number, (name, shapes) in enumerate(lanes):
        drawn.append(f'<g transform="translate(0 {number * _ROW + 4})"><text class="y" x="{_LEFT - 8}" y="11">')
        drawn.append(f"{name}</text>{''.join(shapes)}</g>")
    drawn += _loss(told, x, top, bottom) if len(told.losses) > 1 else []
    said = f"{counted(len(told.starts), 'start')} in {format_seconds(whole)}; {told.starts[-1].why or 'it runs'}"
    return f'<svg viewBox="0 0 {_WIDTH} {bottom + 34}" role="img" aria-label="{words(said)}">{"".join(drawn)}</svg>'


def _bars(stretches: Sequence[Period], whole: float, x: _Scale, kind: str) -> Iterator[str]:
    for each in stretches:
        begin, end = x(each.begin), x(whole if each.end is None else each.end)
        bad = " bad" if each.is_bad else ""
        yield (
            f'<rect class="{kind}{bad}" x="{begin:.1f}" y="0" width="{max(1.5, end - begin):.1f}" height="{_BAR}">'
            f"<title>{words(each.text)}</title></rect>"
        )
        if kind == "ran" and each.is_bad:
            yield f'<path class="ended" d="M{end:.1f} -3V{_BAR + 3}"/>'


def _mark(at: float, text: str, kind: str) -> str:
    return f'<circle class="{kind}" cx="{at:.1f}" cy="{_BAR / 2}" r="3"><title>{words(text)}</title></circle>'


def _label(at: float, text: str) -> str:
    """Return a label beside a bar: to its right, or to its left if there is no room."""
    anchor = "end" if at > _WIDTH * 0.7 else "start"
    place = at + (-4 if anchor == "end" else 4)
    return f'<text class="on" text-anchor="{anchor}" x="{place:.1f}" y="11">{words(text)}</text>'


def _axis(whole: float, x: _Scale, bottom: float) -> list[str]:
    step = next((each for each in _STEPS if whole / each <= _MOST_TICKS), _STEPS[-1])
    drawn = []
    for number in range(int(whole // step) + 1):
        at = x(number * step)
        drawn.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{bottom}"/>')
        drawn.append(f'<text class="x" x="{at:.1f}" y="{bottom + 15}">{_clock(number * step, step)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn.append(f'<text class="x unit" x="{middle}" y="{bottom + 30}">since the run began</text>')
    return drawn


def _clock(seconds: int, step: int) -> str:
    """Return `2:30 h`, `1:05 min`, `40 s`: in the unit of the axis."""
    if step >= 86400:
        return f"{seconds // 86400} d"
    if step >= 1800:
        return f"{seconds // 3600}:{seconds % 3600 // 60:02} h"
    return f"{seconds // 60}:{seconds % 60:02} min" if step >= 10 else f"{seconds} s"


def _loss(told: History, x: _Scale, top: float, bottom: float) -> list[str]:
    """Return a mark for each start of the ranks."""
    shown = told.losses[:: -(-len(told.losses) // _MOST_MARKS)]
    low, high = min(loss for _, loss in shown), max(loss for _, loss in shown)
    height = bottom - top - 20

    def y(loss: float) -> float:
        return bottom - 6 - (height * (loss - low) / (high - low) if high > low else height / 2)

    before = [None, *(time for time, _ in shown)]
    drawn = ""
    for (time, loss), last in zip(shown, before, strict=False):
        is_new = last is None or any(last < each.begin <= time for each in told.ran)
        drawn += f"{'M' if is_new else 'L'}{x(time):.1f} {y(loss):.1f}"
    return [
        f'<text class="y" x="{_LEFT - 8}" y="{y(high) + 4:.1f}">loss {format_number(high, 3)}</text>',
        f'<text class="y" x="{_LEFT - 8}" y="{y(low) + 4:.1f}">{format_number(low, 3)}</text>' if high > low else "",
        f'<path class="line-0" d="{drawn}"/>',
    ]
