"""The metrics of a run: `metrics.jsonl`, one row a line, and the same for TensorBoard if the recipe asks for it.

Only the first rank writes. A full disk must not end a run: a row that cannot be written is left out entirely, with a
warning.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.output import write_whole
from shardwise.trace.metrics import METRICS, read_metrics
from shardwise.training.folder import TENSORBOARD
from shardwise.training.job import Job
from shardwise.training.progress import Progress
from shardwise.training.world import World

Row = Mapping[str, Any]


class Metrics:
    """The file `metrics.jsonl`. A resumed run keeps the rows up to its first step, and replaces the later ones."""

    def __init__(self, folder: Path, *, after: int) -> None:
        kept, path = [json.dumps(row) for row in read_metrics(folder) if row["step"] <= after], folder / METRICS
        with os_errors_as(f"{path} cannot be written", remedy="room on its disk"):
            write_whole(path, "".join(f"{line}\n" for line in kept))
        # Unbuffered: a row that could not be written must not be flushed again with the next one.
        self._file = path.open("ab", buffering=0)
        self._end = self._file.seek(0, 2)

    def add(self, row: Row) -> str | None:
        """Write a row. Return the problem, if any; then nothing of the row is in the file."""
        # JSON has no non-finite numbers.
        plain = {
            key: None if isinstance(each, float) and not math.isfinite(each) else each for key, each in row.items()
        }
        left = memoryview((json.dumps(plain) + "\n").encode())
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(self._end)
            return f"the metrics of step {row['step']} cannot be written: {error.strerror}"
        self._end = self._file.tell()
        return None

    def close(self) -> None:
        self._file.close()


class MetricLog:
    """The rows of metrics of a run. Every rank calls `add`."""

    def __init__(self, job: Job, world: World, progress: Progress, *, after: int) -> None:
        self._progress, self._is_noting = progress, True
        self._metrics = Metrics(job.folder, after=after) if world.is_first else None
        wants_board = world.is_first and job.recipe.tensorboard
        self._board = Board(job.folder, after=after) if wants_board else None

    def add(self, **row: Any) -> None:
        """Write a row. Warn of a full disk once, until writing works again."""
        if self._metrics is None:
            return
        known = {key: each for key, each in row.items() if each is not None}
        problem = self._metrics.add(known)
        if problem is not None and self._is_noting:
            self._progress.warn(f"{problem}; they are left out until there is room, and training goes on")
        self._is_noting = problem is None
        if self._board is not None:
            self._board.add(known)

    def close(self) -> None:
        """Close the files."""
        for each in (self._metrics, self._board):
            if each is not None:
                each.close()


class Board:
    """The same rows for TensorBoard. Steps that are repeated after a restart are shown once."""

    def __init__(self, folder: Path, *, after: int) -> None:
        self._writer = find_board()(str(folder / TENSORBOARD), purge_step=after + 1 if after else None)

    def add(self, row: Row) -> None:
        for key, each in row.items():
            if key != "step" and isinstance(each, (int, float)):
                self._writer.add_scalar(key, each, row["step"])

    def close(self) -> None:
        self._writer.close()


def find_board() -> Any:
    """Return TensorBoard's writer class. Called before the run begins, so that a missing package is found early."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ShardwiseError(
            "tensorboard=true, and TensorBoard is not installed", remedy="pip install 'shardwise[tensorboard]'"
        ) from None
    return SummaryWriter
