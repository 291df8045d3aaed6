"""A trace in the terminal: a row for each rank, time from left to right.

    rank 0  F0 F1 F2 .  .  .  B0--- B1--- B2---
    rank 1  .  F0 F1 F2 B0--- B1--- B2--- .  .

An event fills its columns with its label and dashes and ends in one blank; a dot begins each cell of idle time. What
is too long for the terminal goes on below, like music: each system says which time it covers and names its ranks again.
A bar `|` is an event too short for a dash and its blank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import ceil, floor

from shardwise.trace.attribution import work_of_ranks
from shardwise.trace.events import Event, Lane, Trace
from shardwise.trace.labels import WORDS, Chunks, chunks_of_ranks, label_of, parts_of
from shardwise.trace.memory import peaks
from shardwise.units import format_number

Paint = Callable[[str, str], str]
#: Text in one style, as `Paint` takes it; no style is the empty one.
Run = tuple[str, str]

_MOST_COLUMNS = 4000
_WIDEST_CELL = 24
_LONGEST_BAR = 40
_IDLE = "dim"
# For each kind, the colours of a rank's first and second chunk: numbers of the 256-colour palette.
_COLOURS = {"F": (75, 153), "B": (215, 223), "I": (79, 158), "W": (149, 192), "S": (183, 189)}
_OTHER_COLOURS = (250, 254)


def plain(text: str, style: str) -> str:  # noqa: ARG001 - the paint that has no colours
    """Return the text unchanged."""
    return text


def draw(trace: Trace, *, width: int, paint: Paint = plain) -> list[str]:
    """Return the lines of the drawing, at most `width` columns wide unless that is too little for a single cell."""
    work = [[event for event in events if event.end > event.start] for events in work_of_ranks(trace)]
    chunks = chunks_of_ranks(trace)
    scale = _choose_scale(trace, work, chunks)
    heads = _heads(trace)
    room = _room(width - len(heads[0]), scale)
    rows = [_cut(_stretches(work[rank], chunks[rank], scale), room) for rank in range(trace.num_ranks)]
    num_systems = max(map(len, rows))
    lines = []
    for system in range(num_systems):
        if num_systems > 1:
            lines += [""] * (system > 0) + [paint(scale.range_of(system * room, (system + 1) * room), _IDLE)]
        systems = [row[system] if system < len(row) else [] for row in rows]
        lines += [_line(head, runs, paint) for head, runs in zip(heads, systems, strict=True)]
    return lines


def legend(paint: Paint = plain) -> str:
    """Return one line that explains the letters and colours."""
    words = [f"{paint(kind, _style(kind, 0))} {word}" for kind, word in WORDS.items()]
    second = "".join(paint(kind.lower(), _style(kind, 1)) for kind in WORDS)
    return "  ".join([*words, f"{second} second chunk", f"{paint('.', _IDLE)} idle"])


def memory_bars(trace: Trace, *, width: int, paint: Paint = plain) -> list[str]:
    """Return a bar for each rank: its peak, and the number."""
    held = peaks(trace)
    heads, numbers = _heads(trace), [format_number(peak, 4) for peak in held]
    room = max(1, min(_LONGEST_BAR, width - len(heads[0]) - 1 - max(map(len, numbers))))
    most = max(held)
    lines = []
    for head, peak, number in zip(heads, held, numbers, strict=True):
        bar = "=" * (ceil(room * peak / most - 1e-9) if peak > 0 else 0)
        lines.append(head + (paint(bar, "blue") + " " if bar else "") + number)
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Which column a time is at. `cell` is the width of the widest label with its blank."""

    start: float
    end: float
    columns_per_second: float
    cell: int

    def column(self, time: float) -> int:
        # Halves all go up, with a little room for the dust of float sums: equal times stay equally wide.
        return floor((time - self.start) * self.columns_per_second + 0.5 + 1e-6)

    def range_of(self, first: int, last: int) -> str:
        times = [min(self.end, self.start + column / self.columns_per_second) for column in (first, last)]
        return "time {} to {}".format(*(format_number(time, 4) for time in times))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Columns of one row that belong together: an event with its label, or, without one, idle time."""

    first: int
    last: int
    label: tuple[Run, ...] = ()
    cell: int = 1

    def piece(self, first: int, last: int) -> list[Run]:
        """Return what is drawn between two columns. A label is never cut: it extends over the edge of its system."""
        if not self.label:
            dots = "".join("." if place % self.cell == 0 else " " for place in range(self.last - self.first - 1)) + " "
            return [(dots[first - self.first : last - self.first], _IDLE)]
        if self.last - self.first == 1:
            return [("|", self.label[-1][1])]
        num_filled = last - first - (last == self.last)
        runs = list(self.label) if self._holds_label and first == self.first else [("", self.label[-1][1])]
        text, style = runs[-1]
        runs[-1] = (text.ljust(num_filled - sum(len(text) for text, _ in runs[:-1]), "-"), style)
        return [*runs, (" " * (last - first - num_filled), "")]

    @property
    def _holds_label(self) -> bool:
        return sum(len(text) for text, _ in self.label) < self.last - self.first


def _choose_scale(trace: Trace, work: list[list[Event]], chunks: tuple[Chunks, ...]) -> _Scale:
    """Return as few columns as let every event hold its label, within reason. Steps are short and few, and ignored."""
    widths = [
        (len("".join(label_of(event, chunks[event.rank]))) + 1, event.seconds)
        for event in chain.from_iterable(work)
        if event.lane is Lane.COMPUTE
    ]
    needed = _columns_per_second(widths) if widths else 1.0
    if trace.makespan > 0:
        needed = min(needed, _MOST_COLUMNS / trace.makespan)
    cell = max((width for width, _ in widths), default=1)
    return _Scale(start=trace.start, end=trace.start + trace.makespan, columns_per_second=needed, cell=cell)


def _columns_per_second(widths: list[tuple[int, float]]) -> float:
    """Return a scale from each event's wanted width and its seconds, which keeps the longest readable.

    Best is room for every label; failing that, a column for every event; failing that, room for the labels that go.
    """
    most = max(_WIDEST_CELL, max(width for width, _ in widths)) / max(seconds for _, seconds in widths)
    labels = max(width / seconds for width, seconds in widths)
    columns = max(1 / seconds for _, seconds in widths)
    if labels <= most or columns <= most:
        return labels if labels <= most else columns
    return max(width / seconds for width, seconds in widths if width / seconds <= most)


def _room(width: int, scale: _Scale) -> int:
    """Return the number of columns of a system: whole cells, and no system much shorter than the others."""
    num_columns = max(1, scale.column(scale.end))
    if num_columns <= width:
        return num_columns
    num_cells = ceil(num_columns / scale.cell)
    overhang = max(0, scale.cell - 2)  # Of a label that begins in the last column of a system.
    num_systems = ceil(num_cells / max(1, (width - overhang) // scale.cell))
    return ceil(num_cells / num_systems) * scale.cell


def _stretches(events: list[Event], chunks: Chunks, scale: _Scale) -> Iterator[_Stretch]:
    reached = 0
    for event in events:
        first, last = max(reached, scale.column(event.start)), scale.column(event.end)
        if last <= first:
            continue  # Too short for a column of its own.
        if first > reached:
            yield _Stretch(first=reached, last=first, cell=scale.cell)
        styles = [_style(part.kind, part.chunk) for part in parts_of(event, chunks)]
        yield _Stretch(first=first, last=last, label=tuple(zip(label_of(event, chunks), styles, strict=True)))
        reached = last
    if scale.column(scale.end) > reached:
        yield _Stretch(first=reached, last=scale.column(scale.end), cell=scale.cell)


def _cut(stretches: Iterator[_Stretch], room: int) -> list[list[Run]]:
    """Deal a row's stretches out to systems of `room` columns."""
    systems: list[list[Run]] = [[]]
    for stretch in stretches:
        first = stretch.first
        while first < stretch.last:
            system = first // room
            systems += [[] for _ in range(system + 1 - len(systems))]
            last = min(stretch.last, (system + 1) * room)
            systems[system] += stretch.piece(first, last)
            first = last
    return systems


def _line(head: str, runs: list[Run], paint: Paint) -> str:
    """Join a row's runs, without blanks at its end."""
    runs = [(head, ""), *runs]
    while runs and not runs[-1][0].rstrip():
        runs.pop()
    if runs:
        runs[-1] = (runs[-1][0].rstrip(), runs[-1][1])
    return "".join(paint(text, style) if style else text for text, style in runs)


def _heads(trace: Trace) -> list[str]:
    digits = len(str(trace.num_ranks - 1))
    return [f"rank {rank:>{digits}}  " for rank in range(trace.num_ranks)]


def _style(kind: str, chunk: int) -> str:
    return f"black on_{_COLOURS.get(kind, _OTHER_COLOURS)[chunk % 2]}"
