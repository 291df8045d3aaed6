"""Metrics of a run, noted by its first rank alone: in a file, and for TensorBoard if it is wanted."""

from typing import Any

from shardwise.training.folder import METRICS
from shardwise.training.job import Job
from shardwise.training.metrics import Board, Metrics
from shardwise.training.progress import Progress
from shardwise.training.world import World


class Notes:
    """Rows of metrics after a step. `add` is called by every rank."""

    def __init__(self, job: Job, world: World, progress: Progress, *, after: int) -> None:
        self._progress, self._is_noting = progress, True
        self._metrics = Metrics(job.folder / METRICS, after=after) if world.is_first else None
        wants_board = world.is_first and job.recipe.tensorboard
        self._board = Board(job.folder, after=after) if wants_board else None

    def add(self, **row: Any) -> None:
        """Keep a row. Of a disk without room a warning tells, once until there is room again."""
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
        """Let go of the files."""
        for each in (self._metrics, self._board):
            if each is not None:
                each.close()
