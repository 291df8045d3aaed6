"""What the tests on GPUs are cut into, how long each piece takes, and what of it is left to do.

Seconds are those of the run that docs/gpu.md is made from. The widest pieces begin first, then those with most
seconds of all their processes: else these would be alone at the end.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from tests.gpu import commands, every_plan, faults, files
from tests.gpu.page import RECORD
from tests.gpu.pieces import Piece
from tests.gpu.record import Record

PARTS = ("plans", "families", "faults", "nccl", "input", "commands", "pytest")
BOTH = ("fp32", "bf16")
COUNTS = (2, 4, 8)
_WIDE = 8
#: What one case takes of which nothing was recorded.
_UNKNOWN = {"plans": 4.0, "families": 4.0, "faults": 14.0, "nccl": 130.0, "input": 100.0, "commands": 25.0}
#: What is left at least when a piece is begun whose cases are recorded one by one.
_LEAST = {"plans": 30.0, "families": 30.0, "faults": 60.0, "commands": 50.0, "pytest": 30.0}


def pieces(parts: Sequence[str], at_once: int = 16, record: Record | None = None) -> list[Piece]:
    """What runs beside each other, in its order, each with how many processes it has at a time."""
    # What has most rows is cut: in one piece it would be alone at the end.
    plans = [Piece("plans", 2, ("--ranks", "2", "--share", str(part), "2")) for part in range(2)]
    families = [Piece("families", 2, ("--share", str(part), "3")) for part in range(3)]
    every = [*(Piece("plans", count, ("--ranks", str(count))) for count in (8, 4)), *plans, *families]
    every += [Piece("faults", count, ("--ranks", str(count))) for count in (2, 4)]
    every += [Piece("nccl", 4), Piece("input", 2)]
    counts = sorted({case.processes for case in commands.cases("cuda")})
    narrow = [str(count) for count in counts if count <= commands.NARROW]
    every.append(Piece("commands", commands.PROCESSES, ("--processes", *narrow), "commands"))
    every += [
        Piece("commands", count, ("--processes", str(count)), f"commands of {count} ranks")
        for count in counts
        if count > commands.NARROW
    ]
    every += _of_files(at_once)
    # What has the GPU for itself comes last: all others would have to end for it. What has most of it comes first, one
    # after the other: later there would never be as much room.
    chosen = [each for each in every if each.part in parts]

    # What is recorded as a whole comes before what a second call can go on with.
    def turn(piece: Piece) -> tuple[bool, bool, bool, float]:
        area = piece.processes * seconds_of(piece, record)
        return piece.processes >= at_once, piece.processes < _WIDE, len(rows_of(piece)) > 1, -area

    return sorted(chosen, key=turn)


def _of_files(at_once: int) -> list[Piece]:
    found, number = [], 0
    for group in files.groups(files.files_for_gpus(), recorded()):
        processes = at_once if files.WHOLE_GPU in group else files.RANKS.get(group[0], 1)
        are_ranks = group[0] in files.RANKS or files.WHOLE_GPU in group
        number += len(group) > 1
        label = f"pytest group {number}" if len(group) > 1 else f"pytest {group[0]}"
        found.append(Piece("pytest", processes, ("--files", *group), label, are_ranks))
    return found


def rows_of(piece: Piece) -> list[str]:
    """The names of all that it records."""
    if piece.part in ("plans", "families"):
        return [row.name for row in plans_of(piece)]
    counts = [int(each) for each in (*piece.values("--ranks"), *piece.values("--processes"))]
    if piece.part == "faults":
        return [f"faults: {name}" for name in faults.names(counts)]
    if piece.part == "commands":
        return [f"commands: {case.name}" for case in commands.wanted(counts)]
    return [f"{piece.part}: {name}" for name in piece.values("--files") or (piece.part,)]


def plans_of(piece: Piece) -> list[every_plan.Row]:
    counts = [int(each) for each in piece.values("--ranks")] or COUNTS
    first, step = map(int, piece.values("--share") or (0, 1))
    return every_plan.wanted_rows(
        with_families=piece.part == "families", counts=counts, precisions=BOTH, share=(first, step)
    )


def is_done(piece: Piece, record: Record) -> bool:
    """Whether the record has all of it: to begin a piece only to find that costs seconds of every call."""
    return all(name in record.rows for name in rows_of(piece))


def seconds_of(piece: Piece, record: Record | None = None) -> float:
    """How long what is left of it takes, where all processes have something to do."""
    left = [name for name in rows_of(piece) if record is None or name not in record.rows]
    if piece.part == "pytest":
        return files.seconds_of([name.removeprefix("pytest: ") for name in left], recorded()) if left else 0.0
    seconds = sum(recorded().get(name, _UNKNOWN[piece.part]) for name in left)
    if piece.part != "commands":
        return seconds
    least = min(int(each) for each in piece.values("--processes") if each != "0")
    return seconds / (piece.processes // least)


def seconds_needed(piece: Piece) -> float:
    """What is left at least when it is begun. What is recorded case by case is begun while there is time for some.
    Others took longer in a run with more beside them; what is not over in time is ended, and costs nothing but that."""
    if piece.part in _LEAST and len(rows_of(piece)) > 1:
        return _LEAST[piece.part]
    return seconds_of(piece)


@cache
def recorded() -> dict[str, float]:
    """The seconds of each row, by its name in a record; of test files also by their names."""
    if not RECORD.exists():
        return {}
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    found = {
        every_plan.Row(**row).name: float(row["seconds"])
        for key in ("rows", "bf16", "families")
        for row in kept.get(key, [])
    }
    for row in kept.get("others", []):
        found[f"{row['part']}: {row['name']}"] = found[row["name"]] = row["seconds"]
        found |= {f"commands: {name}": seconds for name, seconds in row.get("cases", {}).items()}
    return found if files.GUESSED_SECONDS.keys() <= found.keys() else found | files.GUESSED_SECONDS
