"""Checkpoints of a run: begun between two steps, and written during the next ones."""

from typing import Any

from shardwise.training.checkpoint.index import find_last
from shardwise.training.checkpoint.parts import Part, random_parts
from shardwise.training.checkpoint.write import Writer
from shardwise.training.folder import CHECKPOINTS
from shardwise.training.job import Job
from shardwise.training.outcome import StoppedError
from shardwise.training.progress import Progress
from shardwise.training.setup import Setup
from shardwise.training.world import World


def state_to_save(world: World, setup: Setup) -> tuple[list[Part], dict[str, Any]]:
    """Return the parts that this rank holds between two steps, and the other values needed to resume."""
    setup.held.settle()
    parts = [*setup.held.weights(), *setup.held.optimizer_states(), *random_parts(world)]
    extra = {"model": setup.model, "data": setup.data, **setup.scale.state(), **setup.balancer.state()}
    return parts, extra


class Saver:
    """Saves a run on one rank. All ranks make the same calls."""

    def __init__(self, job: Job, world: World, setup: Setup, progress: Progress) -> None:
        self._job, self._world, self._setup, self._progress = job, world, setup, progress
        self.root = job.folder / CHECKPOINTS
        self._writer = Writer(
            self.root, rank=world.rank, num_ranks=world.size, keep=job.recipe.checkpoint.keep, gather=world.gather
        )
        self._saved = setup.step

    def save(self, step: int) -> None:
        """Begin to save, if this step is not saved yet."""
        if step == self._saved:
            return
        parts, extra = state_to_save(self._world, self._setup)
        self._warn(self._writer.save(step, parts, extra))
        self._saved = step

    def finish(self) -> str | None:
        """Wait until the checkpoint in progress is written. Return the newest complete one."""
        with self._progress.working("the last checkpoint is written"):
            self._warn(self._writer.finish())
        last = find_last(self.root)
        return None if last is None else str(last)

    def close(self, *, has_failed: bool) -> None:
        """Close the writer's thread."""
        self._writer.close(has_failed=has_failed)

    def _warn(self, problem: str | None) -> None:
        """Warn of a checkpoint that could not be written, or stop. All ranks have the same `problem`."""
        if problem is None:
            return
        last = find_last(self.root)
        kept = "there is none before it" if last is None else f"{last.name} is still there"
        if self._job.recipe.checkpoint.on_failure == "stop":
            raise StoppedError(
                f"{problem}; {kept}", remedy="room on the disk, then the same command goes on from there"
            )
        self._progress.warn(f"{problem}; {kept}, and training goes on")
