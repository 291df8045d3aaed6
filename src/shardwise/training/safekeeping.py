"""The saved states of a run: checkpoints on disk, and copies in memory between them."""

from typing import NamedTuple

from shardwise.training.checkpoint.index import folder_of
from shardwise.training.copying import Copier
from shardwise.training.job import Job
from shardwise.training.progress import Progress
from shardwise.training.saving import Saver
from shardwise.training.setup import Setup
from shardwise.training.world import World


class Kept(NamedTuple):
    """Which saves were begun between two steps."""

    saved: bool = False
    copied: bool = False


class Safekeeping:
    """The checkpoints and copies of one rank. All ranks make the same calls."""

    def __init__(self, job: Job, world: World, setup: Setup, progress: Progress) -> None:
        self._saver, self._copier = Saver(job, world, setup, progress), Copier(job, world, setup, progress)
        self._every = job.recipe.checkpoint.every
        self._is_on_disk = False

    def is_due(self, step: int) -> bool:
        return self._is_to_be_saved(step) or self._copier.is_due(step)

    def look_up(self, step: int) -> Kept:
        """Save and copy between two steps, if either is due."""
        is_saved = self._is_to_be_saved(step)
        if is_saved:
            self._saver.save(step)
        return Kept(is_saved, self._copier.is_due(step) and self._copier.copy(step))

    def save(self, step: int) -> None:
        self._saver.save(step)

    def finish(self, step: int) -> str | None:
        """Wait until the checkpoint of the last step is written. Return the newest complete one."""
        last = self._saver.finish()
        # If the last one could not be written, the newest state is in memory.
        self._is_on_disk = last is not None and last.endswith(folder_of(self._saver.root, step).name)
        return last

    def close(self, *, is_over: bool, has_failed: bool) -> None:
        """Close threads. If the run is over, or its last step is on disk, delete the copies too."""
        self._saver.close(has_failed=has_failed)
        self._copier.close(is_over=is_over or self._is_on_disk)

    def _is_to_be_saved(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0
