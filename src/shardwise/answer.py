"""The result of a command: one value, printed as JSON for programs or drawn on a canvas for people.

A command computes and never prints. `cli` selects the form, so that `--json` and the drawing always show the same
result, and no command lacks one of them. Nothing here uses `rich`: importing it takes longer than drawing a schedule.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TextIO

from shardwise import environment
from shardwise.units import format_number, round_significant

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_STYLES = {
    "bold": "1",
    "dim": "2",
    **{colour: str(30 + code) for code, colour in enumerate(_COLOURS)},
    **{f"on_{colour}": str(40 + code) for code, colour in enumerate(_COLOURS)},
    **{f"on_{code}": f"48;5;{code}" for code in range(256)},
}
_SGR = re.compile(r"\x1b\[[\d;]*m")
# A number with or without a unit: `25.5`, `6.7 %`, `1.5 ms`, `989 TFLOP/s`. Not a name such as `1f1b`.
_NUMERIC = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)? ?[^\W\d]*[%/]?[^\W\d]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """Where a person reads: a stream, how wide it is, and whether it shows colour."""

    stream: TextIO
    width: int
    colour: bool

    def print(self, text: str = "") -> None:
        """Write a line. It may hold colour codes only if they come from `paint`."""
        self.stream.write(text + "\n")

    def paint(self, text: str, style: str) -> str:
        """Return `text` in `style` if there is colour, otherwise `text`.

        A style is one or more words: `bold`, `dim`, a colour (`red`), a background (`on_red`), or one of the 256
        terminal colours as background (`on_202`).
        """
        return f"\x1b[{_codes(style)}m{text}\x1b[0m" if self.colour and text else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A command's result: `data` for `--json`, `render` for a person, and the exit status (1: a check failed)."""

    data: Mapping[str, object]
    render: Callable[[Canvas], None]
    status: int = 0


def canvas_on(stream: TextIO) -> Canvas:
    """Return the canvas for a stream, by its terminal and the user's environment."""
    return Canvas(stream=stream, width=environment.width_of(stream), colour=environment.wants_colour(stream))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], canvas: Canvas) -> None:
    """Print rows under a bold header. A column of numbers, with or without units, is set to the right."""
    texts = [[format_number(cell) if isinstance(cell, (int, float)) else str(cell) for cell in row] for row in rows]
    for row in texts:
        assert len(row) == len(columns), f"a table of {len(columns)} columns was given a row of {len(row)}"
    widths = [max(map(visible_width, column)) for column in zip(columns, *texts, strict=True)]
    to_right = [_is_numeric(column) for column in zip(*texts, strict=True)] or [False] * len(columns)
    header = [canvas.paint(column, "bold") for column in columns]
    for row in [header, *texts]:
        cells = [
            " " * (width - visible_width(cell)) + cell if right else cell + " " * (width - visible_width(cell))
            for cell, width, right in zip(row, widths, to_right, strict=True)
        ]
        canvas.print("  ".join(cells).rstrip())


def visible_width(text: str) -> int:
    """Columns that `text` takes on the screen: colour codes take none."""
    return len(_SGR.sub("", text))


def json_text(data: Mapping[str, object]) -> str:
    """Strict JSON, a line for each top-level key, floats to 12 significant digits."""
    import json  # A person's drawing needs none.

    lines = [f"  {json.dumps(key)}: {json.dumps(_plain(value), allow_nan=False)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}" if lines else "{}"


def _plain(value: object) -> object:
    """Return `value` in JSON types. Anything else in an answer is a bug of the command that returned it."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return round_significant(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    assert isinstance(value, Iterable), f"an answer holds a {type(value).__name__}, which JSON has no word for"
    return [_plain(item) for item in value]


@cache
def _codes(style: str) -> str:
    words = style.split()
    assert all(word in _STYLES for word in words), f"no such style: {style!r}"
    return ";".join(_STYLES[word] for word in words)


def _is_numeric(column: Sequence[str]) -> bool:
    """Whether every cell that says something says a number; a lone dash or nothing stands for an absent one."""
    cells = [_SGR.sub("", cell).strip() for cell in column]
    told = [cell for cell in cells if cell not in ("", "-")]
    return bool(told) and all(_NUMERIC.fullmatch(cell) for cell in told)
