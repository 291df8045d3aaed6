"""The side thread of a rank's watch (`faults.py`): it reports where the rank stands, observes the other ranks, and ends
waits that can never complete.

One object holds all state that it shares with the watch, which runs in the rank's own threads:

    the watch writes    where the rank stands, which rank it waits for, its connections, that it knows of a fault
    the thread writes   the verdict, and then that all waits are ended
"""

import contextlib
import os
import sys
import threading
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwise.ranks.breaking import break_all
from shardwise.ranks.device_progress import DeviceProgress
from shardwise.ranks.rank_error import RankError, decode, encode
from shardwise.ranks.shared_memory import Pair
from shardwise.ranks.stall import Board, RankLocation, find_stall
from shardwise.torch_private import Store

#: Where the process that started the ranks writes that one of them died.
LOST = "shardwise/lost"
#: Where a rank that ends its own process, because its host does not return, writes why; and its exit status.
LAST_WORD, STATUS_OF_LAST_WORD = "shardwise/last word", 70
#: How long a broken connection may wait for the reason why it broke.
SETTLE_SECONDS = 3.0
# How long a host may take to come back from its GPU once the communicators are aborted.
_LEAVE_SECONDS = 5.0
# And from anything else, such as the user's own code between two steps.
_LEAVE_AT_LAST = 60.0


class Lookout:
    """One rank's watching thread, and its state."""

    def __init__(self, store: Store, name: str, rank: int, num_ranks: int, *, limit: float, beat: float) -> None:
        self._store, self._name, self.rank = store, name, rank
        self._limit, self._beat = limit, beat
        self.place: object = "the start"
        self._moves = 0
        #: The ranks for which this rank waits now.
        self.waits_for: tuple[int, ...] = ()
        #: How many times the limit it waits for them.
        self.patience = 1.0
        self._others = tuple(other for other in range(num_ranks) if other != rank)
        #: The position of its GPU, if the GPU waits for other ranks.
        self.gpu: DeviceProgress | None = None
        #: The groups whose waits it ends when a rank fails.
        self.guarded: list[dist.ProcessGroup | Pair] = []
        #: The error of the failed rank, once it is known.
        self.verdict: RankError | None = None
        #: Whether the rank knows of a failure: it raised itself, or received the error of another.
        self.told = threading.Event()
        #: Whether all guarded groups are broken.
        self.stopped = threading.Event()
        self._closed, self._hurry = threading.Event(), threading.Event()
        self._board = Board(store, name, rank, num_ranks)
        self._thread = threading.Thread(target=self._look, name="shardwise-watch", daemon=True)
        self._thread.start()

    def move(self, place: object) -> None:
        """Record the rank's new position."""
        self.place = place
        self._moves += 1

    def follow(self, device: torch.device) -> None:
        if self.gpu is None:
            self.gpu = DeviceProgress(device)

    def settle(self, seconds: float) -> bool:
        """Look more often for this time, and return whether there is a verdict."""
        self._hurry.set()
        return self.stopped.wait(seconds)

    def places(self) -> list[RankLocation]:
        """Return the positions of all ranks, as they reported last."""
        return self._board.read(self._mine())

    def publish(self, error: RankError) -> None:
        """Publish an error. The first one wins; later ones are its consequences."""
        try:
            if self._store.add(f"{self._name}/failures", 1) == 1:
                self._store.set(f"{self._name}/failed", encode(error))
        except RuntimeError:
            self._stop(error)
        self._hurry.set()

    def leave(self, error: RankError) -> None:
        """Write down what ends this rank, for a rank that finds its connection broken. It ends no other rank: all may
        end like this one."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._name}/left/{self.rank}", encode(error))

    def find_left(self) -> RankError | None:
        """Return what has ended another rank, if one has written that down."""
        keys = (f"{self._name}/left/{other}" for other in self._others)
        with contextlib.suppress(RuntimeError):
            return next((decode(self._store.get(key)) for key in keys if self._store.check([key])), None)
        return None

    def close(self) -> None:
        """Stop looking. If the store no longer answers, do nothing else."""
        self._closed.set()
        self._hurry.set()
        self._thread.join(SETTLE_SECONDS)

    def _mine(self) -> RankLocation:
        waits_for, behind = self.waits_for, None if self.gpu is None else self.gpu.behind()
        if not waits_for and behind is not None:
            # The number shows since when: it changes as long as the GPU makes progress.
            return replace(self._board.mine(behind[1], -2 - behind[0], self._others), on_gpu=True)
        return self._board.mine(self.place, self._moves, waits_for)

    def _look(self) -> None:
        while not self._closed.is_set() and self.verdict is None:
            try:
                self._tick()
            except RuntimeError as error:  # Also what torch raises when the store does not answer.
                why = str(error).partition("\n")[0]
                self._stop(RankError(f"rank {self.rank} lost the store that the ranks share ({why})"))
            hurried = self._hurry.is_set() and self.verdict is None
            if hurried:
                self._closed.wait(0.02)
            else:
                self._hurry.wait(self._beat)
        # A wait that begins while connections are broken may escape: it is ended in the next second.
        while self.verdict is not None and not self.told.is_set() and not self._closed.wait(1.0):
            break_all(self.guarded, again=True)
        if self._closed.is_set() and self.verdict is None:
            with contextlib.suppress(RuntimeError):  # The rank that has the store may have ended before this one.
                self._board.write(self._mine())

    def _tick(self) -> None:
        mine = self._mine()
        self._board.write(mine)
        verdict = self._find_failure()
        stays = mine.at_seconds > 2 * self._beat
        if self.gpu is not None and stays and not mine.waits_for:
            self.gpu.ask()  # Its host may wait for it at an unmarked place.
        if verdict is None and stays and mine.waits_for:
            stall = find_stall(self._board.read(mine), self.rank, self._limit, self.patience)
            if stall is not None:
                self.publish(stall)
                verdict = self._find_failure() or stall
        if verdict is not None:
            self._stop(verdict)

    def _find_failure(self) -> RankError | None:
        for key in (LOST, f"{self._name}/failed"):
            if self._store.check([key]):
                return decode(self._store.get(key))
        return None

    def _stop(self, verdict: RankError) -> None:
        self.verdict = verdict
        self.stopped.set()
        break_all(self.guarded)
        if self.gpu is not None:
            self._see_off(verdict, self.gpu)

    def _see_off(self, verdict: RankError, gpu: DeviceProgress) -> None:
        """Wait until the host knows. If it does not come back, from a GPU that stands still or from NCCL itself, end
        this process: nothing else can."""
        start = time.monotonic()
        while time.monotonic() - start < (_LEAVE_SECONDS if gpu.behind() is not None else _LEAVE_AT_LAST):
            if self.told.wait(0.1) or self._closed.is_set():
                return
        with contextlib.suppress(RuntimeError):
            self._store.set(LAST_WORD, encode(verdict))
        sys.stderr.write(f"error: {verdict}\n")
        sys.stderr.flush()
        os._exit(STATUS_OF_LAST_WORD)
