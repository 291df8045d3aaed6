"""A trace as one SVG file: a row of boxes for each rank, hatched where it idles, and what it holds underneath.

Nothing in it runs or is fetched. Whoever points at a box or a gap is told what it is, by the file itself.
"""

from collections import defaultdict
from dataclasses import dataclass
from html import escape
from itertools import chain
from math import ceil, floor, log10
from typing import NamedTuple

from shardwise.trace.attribution import EXPOSED, Gap, gaps, work_of_ranks
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.labels import WORDS, Chunks, chunks_of_ranks, parts_of, stages_of
from shardwise.trace.memory import Curve, held_over_time
from shardwise.units import format_number, format_percent

_LEFT, _RIGHT, _TOP = 76.0, 64.0, 104.0
_ROW, _ROW_PITCH = 26.0, 36.0
_CURVE, _CURVE_PITCH = 28.0, 38.0
_LEAST_WIDTH, _MOST_WIDTH, _WIDEST_BOX = 640.0, 4800.0, 96.0
_DIGIT = 6.6
_MOST_TRANSFERS = 600
_MOST_CURVES = 32

#: Colours that read on our own light ground. For each kind, those of a rank's first and last chunk.
_KINDS = {
    "F": ("#6aa5f2", "#b9d6fb"),
    "B": ("#f2a65e", "#fad7b0"),
    "I": ("#45bfae", "#a9e4da"),
    "W": ("#9ccb5c", "#d5eab3"),
    "S": ("#b497e0", "#dccdf3"),
}
_OTHER_KINDS = ("#b4bcc8", "#dde2e9")
_INK, _FAINT_INK, _RULE, _GROUND = "#1d2733", "#6b7785", "#e3e7ec", "#ffffff"
_CURVE_INK, _CURVE_AREA, _TRANSFER = "#5b6ee1", "#e4e8fb", "#46566b"
_IDLE_FILL, _EXPOSED_FILL = "url(#idle)", "url(#exposed)"

_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_STYLE = f"""\
text {{ font-family: {_FONT}; font-size: 11px; fill: {_INK}; }}
.title {{ font-size: 17px; font-weight: 600; }}
.faint {{ fill: {_FAINT_INK}; }}
.middle {{ text-anchor: middle; }}
.end {{ text-anchor: end; }}
.rule {{ stroke: {_RULE}; stroke-width: 1; }}
.transfer {{ stroke: {_TRANSFER}; stroke-width: 0.8; stroke-opacity: 0.55; }}
.curve {{ fill: none; stroke: {_CURVE_INK}; stroke-width: 1.4; }}
.area {{ fill: {_CURVE_AREA}; }}
"""


def to_svg(trace: Trace, *, title: str) -> str:
    """Return the text of the file."""
    chunks = chunks_of_ranks(trace)
    work = [[event for event in events if event.end > event.start] for events in work_of_ranks(trace)]
    found = [gap for rank in gaps(trace) for gap in rank]
    frame = _Frame(start=trace.start, seconds=trace.makespan, width=_plot_width(trace, work), num_ranks=trace.num_ranks)
    elements = [*_head(trace, title), *_legend(work, chunks, found), *_axis(frame)]
    elements += [_gap(gap, frame) for gap in found]
    elements += _transfers(trace, frame)
    for rank, events in enumerate(work):
        elements.append(_text(_LEFT - 12, frame.y(rank) + _ROW / 2 + 4, f"rank {rank}", kind="end"))
        elements += [_box(event, chunks[rank], frame) for event in events]
    curves = held_over_time(trace) if trace.num_ranks <= _MOST_CURVES else ()
    elements += _curves(curves, frame)
    height = frame.bottom + 48 + (len(curves) * _CURVE_PITCH + 30 if any(curves) else 0)
    return _page(_LEFT + frame.width + _RIGHT, height, title, elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where a time and a rank are on the page."""

    start: float
    seconds: float
    width: float
    num_ranks: int

    def x(self, time: float) -> float:
        return _LEFT + (time - self.start) * self.width / (self.seconds or 1.0)

    def y(self, rank: int) -> float:
        return _TOP + rank * _ROW_PITCH

    @property
    def bottom(self) -> float:
        return self.y(self.num_ranks - 1) + _ROW


def _plot_width(trace: Trace, work: list[list[Event]]) -> float:
    """Return as many pixels as give each box its number, unless very unequal times would make the longest box
    endless."""
    events = [event for rank in work for event in rank]
    if not events:
        return _LEAST_WIDTH
    needed = max((_DIGIT * len(str(event.microbatch)) + 9) / event.seconds for event in events)
    needed = min(needed, _WIDEST_BOX / max(event.seconds for event in events))
    return min(max(needed * trace.makespan, _LEAST_WIDTH), _MOST_WIDTH)


def _head(trace: Trace, title: str) -> list[str]:
    facts = [f"makespan {format_number(trace.makespan, 4)}"]
    if trace.span > 0:
        facts += [f"span {format_number(trace.span, 4)}", f"bubble {format_percent(trace.bubble)}"]
    return [
        _text(24, 34, title, kind="title"),
        _text(24, 54, " \N{MIDDLE DOT} ".join(facts), kind="faint"),
    ]


def _legend(work: list[list[Event]], chunks: tuple[Chunks, ...], found: list[Gap]) -> list[str]:
    """Return only the entries that occur in the drawing."""
    kinds = {
        part.kind for rank, events in enumerate(work) for event in events for part in parts_of(event, chunks[rank])
    }
    entries = [(colour_of(kind, 0, 1), word) for kind, word in WORDS.items() if kind in kinds]
    num_chunks = max(map(len, chunks))
    if entries and num_chunks > 1:
        kind = next(kind for kind in WORDS if kind in kinds)
        entries.append((colour_of(kind, 1, 2), "second chunk" if num_chunks == 2 else "later chunks"))
    if any(gap.cause not in EXPOSED for gap in found):
        entries.append((_IDLE_FILL, "idle"))
    if any(gap.cause in EXPOSED for gap in found):
        entries.append((_EXPOSED_FILL, "exposed communication"))
    elements, x = [], 24.0
    for fill, word in entries:
        elements += [_rect(x, 68, 14, 14, fill, radius=3), _text(x + 20, 79, word, kind="faint")]
        x += 38 + 5.8 * len(word)
    return elements


def _axis(frame: _Frame) -> list[str]:
    """Rules through the rows at round times."""
    step = _round_step(frame.seconds * 64 / frame.width)
    elements = []
    for tick in range(ceil(frame.start / step - 1e-9), floor((frame.start + frame.seconds) / step + 1e-9) + 1):
        x = frame.x(tick * step)
        elements.append(_line(x, _TOP - 6, x, frame.bottom + 8, "rule"))
        elements.append(_text(x, frame.bottom + 22, format_number(tick * step), kind="faint middle"))
    return elements


def _round_step(least: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50, ... (or of their tenths) that is not less."""
    if least <= 0:
        return 1.0
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _box(event: Event, chunks: Chunks, frame: _Frame) -> str:
    """Return a computation with its microbatch. The halves of an overlapped pair are stacked: they run at once."""
    parts = parts_of(event, chunks)
    x, width = frame.x(event.start), frame.x(event.end) - frame.x(event.start)
    drawn = max(width - 1, width * 0.7)  # A hair of ground between neighbours.
    height = _ROW / len(parts)
    elements = []
    for place, part in enumerate(parts):
        y = frame.y(event.rank) + place * height
        fill = colour_of(part.kind, part.chunk, len(chunks))
        elements.append(_rect(x, y, drawn, height, fill, radius=min(3, drawn / 4)))
        if _DIGIT * len(str(part.microbatch)) + 2 <= drawn and part.kind != "S":
            elements.append(_text(x + drawn / 2, y + height / 2 + 4, str(part.microbatch), kind="middle"))
    return _group("event", f"{event.name}: {_times(event.start, event.end)}", *elements)


def _gap(gap: Gap, frame: _Frame) -> str:
    x, width = frame.x(gap.start), frame.x(gap.end) - frame.x(gap.start)
    fill = _EXPOSED_FILL if gap.cause in EXPOSED else _IDLE_FILL
    tip = f"{gap.cause}: {_times(gap.start, gap.end)}"
    if gap.on is not None:
        tip += f", {gap.on} of rank {gap.on_rank}"
    return _group("gap", tip, _rect(x, frame.y(gap.rank), width, _ROW, fill))


def _times(start: float, end: float) -> str:
    return f"{format_number(start, 6)} to {format_number(end, 6)}"


class Transfer(NamedTuple):
    """A value that went from rank to rank. `reader` is the first computation on it after it came, if there was one."""

    send: Event
    receive: Event
    reader: Event | None


def transfers(trace: Trace) -> list[Transfer]:
    """Return every transfer with both ends in the trace, in the order of the receives."""
    readers: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
    for event in chain.from_iterable(trace.compute):
        for stage, microbatch in stages_of(event):
            readers[event.rank, stage, microbatch].append(event)
    found = []
    for receive in trace.events:
        if receive.lane is Lane.RECEIVE and receive.after is not None:
            later = readers[receive.rank, receive.stage, receive.microbatch]
            reader = next((event for event in later if event.start >= receive.end), None)
            found.append(Transfer(trace.events[receive.after], receive, reader))
    return found


def _transfers(trace: Trace, frame: _Frame) -> list[str]:
    """Return a thin line for each of them. More than a few hundred would hide the boxes."""
    found = transfers(trace)
    if len(found) >= _MOST_TRANSFERS:
        return []
    elements = []
    for send, receive, reader in found:
        down = receive.rank > send.rank
        end = send.end if reader is None else reader.start
        y1 = frame.y(send.rank) + (_ROW if down else 0)
        y2 = frame.y(receive.rank) + (0 if down else _ROW)
        elements.append(_line(frame.x(send.start), y1, frame.x(end), y2, "transfer"))
    return elements


def _curves(curves: tuple[Curve, ...], frame: _Frame) -> list[str]:
    """Return what each rank holds over time, on one scale, with its peak at the right."""
    most = max((held for curve in curves for _, held in curve), default=0.0)
    if most <= 0:
        return []
    top = frame.bottom + 58
    right = _LEFT + frame.width + 10
    elements = [_text(_LEFT, top - 10, "held", kind="faint"), _text(right, top - 10, "peak", kind="faint")]
    for rank, curve in enumerate(curves):
        bottom = top + rank * _CURVE_PITCH + _CURVE
        first, last = _number(frame.x(frame.start)), _number(frame.x(frame.start + frame.seconds))
        steps = "".join(f"H{_number(frame.x(time))}V{_number(bottom - _CURVE * held / most)}" for time, held in curve)
        steps = f"M{first} {_number(bottom)}{steps}H{last}"
        elements.append(_path(f"{steps}V{_number(bottom)}Z", "area"))
        elements.append(_path(steps, "curve"))
        elements.append(_text(_LEFT - 12, bottom - _CURVE / 2 + 4, f"rank {rank}", kind="end"))
        peak = format_number(max((held for _, held in curve), default=0.0), 4)
        elements.append(_text(right, bottom - _CURVE / 2 + 4, peak))
    return elements


def colour_of(kind: str, chunk: int, num_chunks: int) -> str:
    """Return the shade of a chunk: lighter for later ones."""
    dark, light = _KINDS.get(kind, _OTHER_KINDS)
    share = chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    mixed = [
        round(int(dark[place : place + 2], 16) * (1 - share) + int(light[place : place + 2], 16) * share)
        for place in (1, 3, 5)
    ]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _number(value: float) -> str:
    """Hundredths of a pixel are enough, and keep the file small."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _rect(x: float, y: float, width: float, height: float, fill: str, *, radius: float = 0) -> str:
    extra = f' rx="{_number(radius)}"' if radius else ""
    place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    return f'<rect{extra} {place} fill="{fill}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"/>'


def _text(x: float, y: float, words: str, *, kind: str = "") -> str:
    extra = f' class="{kind}"' if kind else ""
    return f'<text{extra} x="{_number(x)}" y="{_number(y)}">{escape(words, quote=False)}</text>'


def _path(commands: str, kind: str) -> str:
    return f'<path class="{kind}" d="{commands}"/>'


def _group(kind: str, tip: str, *elements: str) -> str:
    """Elements that belong together; a reader who points at them sees the tip."""
    return f'<g class="{kind}"><title>{escape(tip, quote=False)}</title>{"".join(elements)}</g>'


def _page(width: float, height: float, title: str, elements: list[str]) -> str:
    """Return a whole file with its own background, so that it looks the same on a light and on a dark page."""
    size = f'width="{_number(width)}" height="{_number(height)}" viewBox="0 0 {_number(width)} {_number(height)}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title, quote=False)}</title>",
        f"<style>\n{_STYLE}</style>",
        f"<defs>{_hatch('idle', '#f3f5f7', '#e1e5ea')}{_hatch('exposed', '#fdeeee', '#f3bcbc')}</defs>",
        f'<rect x="0.5" y="0.5" width="{_number(width - 1)}" height="{_number(height - 1)}" rx="10" '
        f'fill="{_GROUND}" stroke="{_RULE}"/>',
    ]
    return "\n".join([*head, *elements, "</svg>", ""])


def _hatch(name: str, ground: str, stroke: str) -> str:
    return (
        f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{ground}"/><rect width="2" height="6" fill="{stroke}"/></pattern>'
    )
