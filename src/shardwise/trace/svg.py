"""A trace as one SVG file: a row of boxes for each rank, hatched where it idles, and what it holds underneath.

Nothing in it runs or is fetched. Whoever points at a box or a gap is told what it is, by the file itself.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from math import ceil, floor, log10
from typing import NamedTuple

from shardwise.trace import shapes
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
        elements.append(shapes.text(_LEFT - 12, frame.y(rank) + _ROW / 2 + 4, f"rank {rank}", kind="end"))
        elements += [_box(event, chunks[rank], frame) for event in events]
    curves = held_over_time(trace) if trace.num_ranks <= _MOST_CURVES else ()
    elements += _curves(curves, frame)
    height = frame.bottom + 48 + (len(curves) * _CURVE_PITCH + 30 if any(curves) else 0)
    return shapes.page(_LEFT + frame.width + _RIGHT, height, title, elements)


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
    """As many pixels as give each box its number, unless very unequal times would make the longest box endless."""
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
        shapes.text(24, 34, title, kind="title"),
        shapes.text(24, 54, " \N{MIDDLE DOT} ".join(facts), kind="faint"),
    ]


def _legend(work: list[list[Event]], chunks: tuple[Chunks, ...], found: list[Gap]) -> list[str]:
    """Only what is in the drawing."""
    kinds = {
        part.kind for rank, events in enumerate(work) for event in events for part in parts_of(event, chunks[rank])
    }
    entries = [(shapes.colour_of(kind, 0, 1), word) for kind, word in WORDS.items() if kind in kinds]
    num_chunks = max(map(len, chunks))
    if entries and num_chunks > 1:
        kind = next(kind for kind in WORDS if kind in kinds)
        entries.append((shapes.colour_of(kind, 1, 2), "second chunk" if num_chunks == 2 else "later chunks"))
    if any(gap.cause not in EXPOSED for gap in found):
        entries.append((shapes.IDLE, "idle"))
    if any(gap.cause in EXPOSED for gap in found):
        entries.append((shapes.EXPOSED, "exposed communication"))
    elements, x = [], 24.0
    for fill, word in entries:
        elements += [shapes.rect(x, 68, 14, 14, fill, radius=3), shapes.text(x + 20, 79, word, kind="faint")]
        x += 38 + 5.8 * len(word)
    return elements


def _axis(frame: _Frame) -> list[str]:
    """Rules through the rows at round times."""
    step = _round_step(frame.seconds * 64 / frame.width)
    elements = []
    for tick in range(ceil(frame.start / step - 1e-9), floor((frame.start + frame.seconds) / step + 1e-9) + 1):
        x = frame.x(tick * step)
        elements.append(shapes.line(x, _TOP - 6, x, frame.bottom + 8, "rule"))
        elements.append(shapes.text(x, frame.bottom + 22, format_number(tick * step), kind="faint middle"))
    return elements


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ... (or of their tenths) that is not less."""
    if least <= 0:
        return 1.0
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _box(event: Event, chunks: Chunks, frame: _Frame) -> str:
    """A computation with its microbatch. The halves of an overlapped pair lie above each other: they run at once."""
    parts = parts_of(event, chunks)
    x, width = frame.x(event.start), frame.x(event.end) - frame.x(event.start)
    drawn = max(width - 1, width * 0.7)  # A hair of ground between neighbours.
    height = _ROW / len(parts)
    elements = []
    for place, part in enumerate(parts):
        y = frame.y(event.rank) + place * height
        fill = shapes.colour_of(part.kind, part.chunk, len(chunks))
        elements.append(shapes.rect(x, y, drawn, height, fill, radius=min(3, drawn / 4)))
        if _DIGIT * len(str(part.microbatch)) + 2 <= drawn and part.kind != "S":
            elements.append(shapes.text(x + drawn / 2, y + height / 2 + 4, str(part.microbatch), kind="middle"))
    return shapes.group("event", f"{event.name}: {_times(event.start, event.end)}", *elements)


def _gap(gap: Gap, frame: _Frame) -> str:
    x, width = frame.x(gap.start), frame.x(gap.end) - frame.x(gap.start)
    fill = shapes.EXPOSED if gap.cause in EXPOSED else shapes.IDLE
    tip = f"{gap.cause}: {_times(gap.start, gap.end)}"
    if gap.on is not None:
        tip += f", {gap.on} of rank {gap.on_rank}"
    return shapes.group("gap", tip, shapes.rect(x, frame.y(gap.rank), width, _ROW, fill))


def _times(start: float, end: float) -> str:
    return f"{format_number(start, 6)} to {format_number(end, 6)}"


class Transfer(NamedTuple):
    """A value that went from rank to rank. `reader` is the first computation on it after it came, if there was one."""

    send: Event
    receive: Event
    reader: Event | None


def transfers(trace: Trace) -> list[Transfer]:
    """Every transfer whose both ends are in the trace, in the order of the receives."""
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
    """A thin line for each of them. More than a few hundred would hide the boxes."""
    found = transfers(trace)
    if len(found) >= _MOST_TRANSFERS:
        return []
    elements = []
    for send, receive, reader in found:
        down = receive.rank > send.rank
        end = send.end if reader is None else reader.start
        y1 = frame.y(send.rank) + (_ROW if down else 0)
        y2 = frame.y(receive.rank) + (0 if down else _ROW)
        elements.append(shapes.line(frame.x(send.start), y1, frame.x(end), y2, "transfer"))
    return elements


def _curves(curves: tuple[Curve, ...], frame: _Frame) -> list[str]:
    """What each rank holds over time, all to one scale, with its peak at the right."""
    most = max((held for curve in curves for _, held in curve), default=0.0)
    if most <= 0:
        return []
    top = frame.bottom + 58
    right = _LEFT + frame.width + 10
    elements = [shapes.text(_LEFT, top - 10, "held", kind="faint"), shapes.text(right, top - 10, "peak", kind="faint")]
    for rank, curve in enumerate(curves):
        bottom = top + rank * _CURVE_PITCH + _CURVE
        first, last = shapes.number(frame.x(frame.start)), shapes.number(frame.x(frame.start + frame.seconds))
        steps = "".join(
            f"H{shapes.number(frame.x(time))}V{shapes.number(bottom - _CURVE * held / most)}" for time, held in curve
        )
        steps = f"M{first} {shapes.number(bottom)}{steps}H{last}"
        elements.append(shapes.path(f"{steps}V{shapes.number(bottom)}Z", "area"))
        elements.append(shapes.path(steps, "curve"))
        elements.append(shapes.text(_LEFT - 12, bottom - _CURVE / 2 + 4, f"rank {rank}", kind="end"))
        peak = format_number(max((held for _, held in curve), default=0.0), 4)
        elements.append(shapes.text(right, bottom - _CURVE / 2 + 4, peak))
    return elements
