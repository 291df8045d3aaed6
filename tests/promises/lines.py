"""The table of lines in docs/structure.md: the one place that says which package stands where."""

import re
from dataclasses import dataclass
from functools import cache

from tests.promises.sources import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table. `rooms` are packages or single modules, without slash or suffix."""

    line: int
    rooms: tuple[str, ...]
    may_use_torch: bool
    is_here: bool


@cache
def read_rows() -> tuple[Row, ...]:
    """The rows of the table, from the top."""
    rows = []
    for text in (ROOT / "docs" / "structure.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in text.strip("|").split("|")]
        if len(cells) == 5 and cells[0].isdecimal():
            rooms = tuple(name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", cells[1]))
            rows.append(
                Row(line=int(cells[0]), rooms=rooms, may_use_torch=cells[3] == "yes", is_here=cells[4] == "yes")
            )
    return tuple(rows)


def room_of(module: str) -> str | None:
    """The room that a module of Shardwise is in: `schedule` for `shardwise.schedule.text`. The root is in none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def row_of(room: str) -> Row | None:
    """The row of the table that names a room."""
    return next((row for row in read_rows() if room in row.rooms), None)
