"""The in-memory copies of a run, as its ranks share them: the machine of each rank, the keeper of each machine, and the
generations that survive a restart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise import environment
from shardwise.copies.keepers import (
    FAILURES,
    Staying,
    find_keeper,
    forget_copies,
    holders_of,
    known_keepers,
    start_keeper,
    survey,
    wait_for_keeper,
)
from shardwise.copies.memory import COPIES, Generation, draw_id, memory_of
from shardwise.standby.asker import start_server
from shardwise.training.checkpoint.in_memory import Neighbour, open_generation
from shardwise.training.checkpoint.read import Reader
from shardwise.training.job import Job
from shardwise.training.world import World


class Found(NamedTuple):
    """A complete generation, and the nodes that have each rank's piece."""

    generation: Generation
    holders: Mapping[int, list[str]]


class RunCopies:
    """The copies, constructed on every rank. `nodes[rank]` is its node. A node's first rank manages its keeper."""

    def __init__(self, folder: Path, run_id: str, rank: int, nodes: list[str]) -> None:
        self._folder, self.nodes, self.node = folder, nodes, nodes[rank]
        self.memory = memory_of(run_id, self.node)
        self.is_first_here = nodes.index(self.node) == rank
        self._staying: Staying | None = None
        self.memory.make()
        if self.is_first_here and not self._is_kept():
            start_keeper(folder, self.node, self.memory)

    @property
    def neighbour(self) -> Neighbour | None:
        """The next machine in the order of ranks. The neighbour of the last is the first."""
        order = list(dict.fromkeys(self.nodes))
        if len(order) == 1:
            return None
        return Neighbour(self._folder, order[(order.index(self.node) + 1) % len(order)])

    def wait(self) -> None:
        """Wait until the keeper of this node is up. Raise an `OSError` or a `WireError` if it fails."""
        if self.is_first_here and self._staying is None:
            self._staying = wait_for_keeper(self._folder, self.node)

    def see_to_keeper(self) -> None:
        """Restart the keeper if it is gone; the copies themselves are still there. Another thread may call this."""
        if self.is_first_here and (self._staying is None or not self._staying.is_heard):
            self.close()
            start_keeper(self._folder, self.node, self.memory)
            self.wait()

    def stand_by(self) -> None:
        """Start a standby process on this node with all imports done, for a faster restart of ranks."""
        if self.is_first_here and environment.place_under_torchrun() is not None:
            start_server(self._folder, self.node, self._folder / COPIES / f"{self.memory.folder.name}.log")

    def found(self, *, since: int) -> list[Found]:
        """Return the complete generations of step `since` or later, newest first."""
        return [Found(*each) for each in holders_of(survey(self._folder)).items() if each[0].step >= since]

    def reader(self, found: Found) -> Reader:
        keepers = {keeper.node: keeper for keeper in known_keepers(self._folder)}
        return open_generation(found.generation, self.memory, found.holders, keepers)

    def forget(self) -> None:
        """Delete the copies, because the run is over."""
        forget_copies(self._folder)

    def close(self) -> None:
        if self._staying is not None:
            self._staying.close()
            self._staying = None

    def _is_kept(self) -> bool:
        keeper = find_keeper(self._folder, self.node)
        try:
            if keeper is not None:
                self._staying = Staying(keeper)
        except FAILURES:
            pass
        return self._staying is not None


def open_copies(job: Job, world: World) -> RunCopies | str | None:
    """Return the copies of a run, None if they are off, or the reason why they fail. Every rank calls this."""
    if job.copies_every == 0:
        return None
    made: RunCopies | None = None
    problem: Any = None
    try:
        run_id = draw_id(job.folder) if world.is_first else None
    except OSError as error:
        run_id, problem = None, str(error)
    told = world.gather((environment.node_name(), run_id))
    nodes, run_id = [node for node, _ in told], told[0][1]
    if run_id is not None:
        try:
            made = RunCopies(job.folder, run_id, world.rank, nodes)
            made.wait()
        except FAILURES as error:
            problem = f"{environment.node_name()} cannot keep copies in {environment.memory_root()}: {error}"
    problem = next((each for each in world.gather(problem) if each is not None), None)
    if problem is not None and made is not None:
        made.close()
    return made if problem is None else problem
