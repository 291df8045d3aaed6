"""Which processes of a test still run."""

import time
from collections.abc import Iterable
from pathlib import Path


def processes_in(folder: Path) -> list[int]:
    return [int(word) for path in folder.glob("rank?") for word in path.read_text().split()]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # It ended, perhaps while this was read.
        return False
    return state != "Z"


def are_gone(processes: Iterable[int], *, seconds: float = 60.0) -> bool:
    """Whether all of them have ended, or end within so long: one that has been killed takes a moment to be gone, and
    what it wrote to is told before that."""
    left, deadline = list(processes), time.monotonic() + seconds
    while (left := [each for each in left if is_running(each)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def nobody_runs(folder: Path, *, num_ranks: int = 3) -> bool:
    """Whether ranks and what they started are all gone."""
    everyone = processes_in(folder)
    assert len(everyone) == 2 * num_ranks
    return are_gone(everyone)
