"""Simulated ranks in one process: each is a thread, they take turns, and a collective is a meeting of all of them.

This shows what a plan computes before any process communicates: nothing is sent, no rank can deadlock with one that
took another path, and every process that simulates gets the same result.
"""

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.ranks.collectives import Group

Result = TypeVar("Result")

#: If a rank computes for longer than this while the others wait, it has taken another path than they have.
_LIMIT_SECONDS = 120.0


class Meeting:
    """The meeting of a group's threads at a collective: each brings a tensor, and all see the tensors of all.

    Only one thread runs at a time, from one collective to the next, because some state of a forward belongs to the
    whole process: the level of forward-mode derivatives, globals of the script, settings of torch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._is_broken = False
        self._brought: list[Any] = [None] * size
        self._turns[0].release()

    def wait(self, rank: int) -> None:
        """Wait until it is this rank's turn."""
        came = self._turns[rank].acquire(timeout=_LIMIT_SECONDS * self.size)
        if self._is_broken or not came:
            raise threading.BrokenBarrierError

    def hand_on(self, rank: int) -> None:
        """Give the turn to the next rank."""
        self._turns[(rank + 1) % self.size].release()

    def call(self, rank: int, kind: str, tensor: Tensor | None, make: Callable[[list[Tensor]], Result]) -> Result:
        """Return the result of `make` on the tensors of all ranks. No rank continues before all have their result."""
        self._brought[rank] = kind, tensor
        self.hand_on(rank)
        self.wait(rank)  # The others have brought theirs.
        kinds = [each for each, _ in self._brought]
        tensors = [each for _, each in self._brought]
        try:
            if len(set(kinds)) > 1:
                raise RuntimeError(f"ranks went different ways: {', '.join(kinds)}")
            made = make(tensors)
        except BaseException:
            self.abort()
            raise
        self.hand_on(rank)
        self.wait(rank)  # The others have made theirs.
        return made

    def abort(self) -> None:
        """End all waits."""
        self._is_broken = True
        for each in self._turns:
            each.release()


class SimulatedGroup(Group):
    """One rank of several threads. Without a meeting it is alone, and may only run on the meta device."""

    def __init__(self, rank: int, size: int, meeting: Meeting | None = None) -> None:
        super().__init__()
        self.rank, self.size, self._meeting = rank, size, meeting

    def _meet(self, kind: str, tensor: Tensor | None, make: Callable[[list[Tensor]], Result]) -> Result:
        assert self._meeting is not None, f"{kind} of a rank that is alone, with numbers"
        return self._meeting.call(self.rank, kind, tensor, make)

    def all_reduce(self, whole: Tensor, op: Any) -> None:
        def make(tensors: list[Tensor]) -> Tensor:
            stacked = torch.stack([each.detach() for each in tensors])
            return stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0)

        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX), f"{op} is not simulated"
        made = self._meet("all_reduce", whole, make)
        with torch.no_grad():
            whole.copy_(made)

    def all_gather(self, stacked: Tensor, piece: Tensor) -> None:
        made = self._meet("all_gather", piece, lambda pieces: torch.cat([each.detach() for each in pieces]))
        with torch.no_grad():
            stacked.copy_(made)

    def reduce_scatter(self, piece: Tensor, stacked: Tensor) -> None:
        mine = slice(self.rank * piece.numel(), (self.rank + 1) * piece.numel())
        made = self._meet(
            "reduce_scatter", stacked, lambda tensors: torch.stack([each.detach()[mine] for each in tensors]).sum(0)
        )
        with torch.no_grad():
            piece.copy_(made)

    def all_to_all(self, arrived: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        raise NotImplementedError("experts are tried without their exchange (sharding/expert/trial.py)")


def simulate(size: int, run: Callable[[SimulatedGroup], Result]) -> list[Result]:
    """Run a function on every rank of a group, each in a thread of this process; raise the first error."""
    meeting = Meeting(size)
    results: list[Result | None] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            # Autograd has one thread per device for all callers: ranks that meet in a backward would deadlock.
            with torch.autograd.set_multithreading_enabled(False):
                meeting.wait(rank)
                results[rank] = run(SimulatedGroup(rank, size, meeting))
                meeting.call(rank, "the end", None, lambda _: None)
                meeting.hand_on(rank)
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    # Each has the context variables of its caller, which a forward may ask for.
    threads = [
        threading.Thread(target=copy_context().run, args=(work, rank), name=f"simulated rank {rank}")
        for rank in range(size)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    own = [each for each in errors if not isinstance(each, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return results  # type: ignore[return-value]
