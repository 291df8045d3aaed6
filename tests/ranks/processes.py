"""Which processes of a test still run."""

import time
from pathlib import Path


def processes_in(folder: Path) -> list[int]:
    return [int(word) for path in folder.glob("rank?") for word in path.read_text().split()]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # It ended, perhaps while this was read.
        return False
    return state != "Z"


def nobody_runs(folder: Path, *, num_ranks: int = 3) -> bool:
    """Whether ranks and what they started are all gone. The dead take a moment to be buried."""
    everyone = processes_in(folder)
    assert len(everyone) == 2 * num_ranks
    deadline = time.monotonic() + 60
    while any(map(is_running, everyone)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, everyone))
