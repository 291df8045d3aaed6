"""The tables of lines in docs/structure.md: the one place that says which package stands where.

One table is of the rooms, and has four columns. One is of rooms inside rooms, and has three:

    | line | sub-room                      | one sentence                |
    |------|-------------------------------|-----------------------------|
    | 0    | `states/layout.py`            | which numbers lie where     |
    | 1    | `states/tiers/`               | where they live             |
    | 1    | `execution/local.py`          | ...                         |

The lines of a sub-room count among the sub-rooms of the same parent only.
"""

import re
from dataclasses import dataclass
from functools import cache

from tests.promises.sources import ROOT

STRUCTURE = ROOT / "docs" / "structure.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table. `rooms` are packages or single modules, without suffix: `cost`, `states/tiers`."""

    line: int
    rooms: tuple[str, ...]
    may_use_torch: bool


@cache
def read_rows() -> tuple[Row, ...]:
    """The rows of the table of rooms, from the top."""
    return rows_in(STRUCTURE.read_text(encoding="utf-8"))


@cache
def read_sub_rows() -> tuple[Row, ...]:
    """The rows of the table of rooms inside rooms, from the top."""
    return sub_rows_in(STRUCTURE.read_text(encoding="utf-8"))


def rows_in(text: str) -> tuple[Row, ...]:
    return tuple(
        Row(
            line=int(cells[0]),
            rooms=_rooms_in(cells[1]),
            may_use_torch=cells[3] == "yes",
        )
        for cells in _tables_in(text)
        if len(cells) == 4
    )


def sub_rows_in(text: str) -> tuple[Row, ...]:
    return tuple(
        Row(line=int(cells[0]), rooms=_rooms_in(cells[1]), may_use_torch=True)
        for cells in _tables_in(text)
        if len(cells) == 3
    )


def _tables_in(text: str) -> list[list[str]]:
    """The cells of every row that begins with a number."""
    rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line)
    return [cells for cells in rows if cells[0].isdecimal()]


def _rooms_in(cell: str) -> tuple[str, ...]:
    return tuple(name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", cell))


def room_of(module: str) -> str | None:
    """The room that a module of Shardwise is in: `schedule` for `shardwise.schedule.text`. The root is in none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def row_of(room: str, rows: tuple[Row, ...]) -> Row | None:
    """The row of a table that names a room."""
    return next((row for row in rows if room in row.rooms), None)


def child_of(parent: str, module: str) -> str | None:
    """What a module is part of, directly below a room: `states/tiers` for `shardwise.states.tiers.store`.

    The parent is written as in the table: `states`, or `states/tiers` for what is below that.
    """
    path = module.replace(".", "/").removeprefix("shardwise/")
    if not path.startswith(f"{parent}/"):
        return None
    return "/".join([parent, path.removeprefix(f"{parent}/").split("/")[0]])
