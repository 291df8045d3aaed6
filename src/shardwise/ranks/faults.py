"""What ranks tell each other so that none of them waits in vain: where each one stands, and what went wrong.

Every rank has a `Watch`. Its side thread writes to the store that the ranks share, twice a second, where the rank
stands, and looks there for errors of others. Then there are three ways for a wait to end early:

    a rank raises       it publishes its error first; the others stop with that error, not with "connection closed"
    a rank dies         its connections break, or the process that started it says so; the others say who is gone
    a rank stalls       the others look whom they wait for, whom that one waits for, and so on; whoever stands at the
                        end of that chain and has neither moved nor answered for `limit_seconds` is named

A rank that waits for long because another one is busy, and moves on, is no fault. A wait cannot be polled (gloo's work
says that it is complete only after it was waited for), so the side thread breaks the connections, and that ends it.

Over NCCL it is the GPU that waits, and its host goes on until it wants a number. A rank then stands where its GPU
does (`device_progress.py`), which waits for whoever else is not there. Communicators are aborted, so that no kernel is
left. A host that does not come back even so (it may be in the making of a communicator, which nothing can end) has its
process ended, with the sentence on stderr and in the store.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from shardwise import environment, torch_private
from shardwise.errors import ShardwiseError
from shardwise.ranks.breaking import break_all
from shardwise.ranks.device_progress import DeviceProgress
from shardwise.ranks.rank_error import RankError, decode, describe_failure, encode
from shardwise.ranks.shared_memory import Pair
from shardwise.ranks.stall import Board, RankLocation, find_stall
from shardwise.ranks.store_meeting import StoreMeeting
from shardwise.torch_private import PrefixStore, Store

#: Where the process that started the ranks writes that one of them died.
LOST = "shardwise/lost"
#: Where a rank that ends its own process, as its host does not come back, writes why; and the status it ends with.
LAST_WORD, STATUS_OF_LAST_WORD = "shardwise/last word", 70
#: How long a rank may be at one instruction, or silent, before it is named as the one that holds up the others.
LIMIT_SECONDS = 20.0
# Waits end by being broken, not by themselves: gloo closes every connection of a group when one wait times out.
_FOREVER = timedelta(days=1)
# How long a broken connection may wait for the reason why it broke.
_SETTLE_SECONDS = 3.0
# The same under `torchrun`, where nobody but a rank itself gives one, and does so before its connections close: who was
# killed says nothing, and the ranks that are left are waited for. A process that started ranks takes longer to tell.
_SETTLE_ALONE_SECONDS = 1.0
# How long a host may take to come back from its GPU once the communicators are aborted.
_LEAVE_SECONDS = 5.0
# And from anything else, such as the user's own code between two steps.
_LEAVE_AT_LAST = 60.0


def _is_of_another(error: BaseException) -> bool:
    """Whether NCCL or gloo says that a rank at the other end is gone. What else they raise is this rank's own."""
    signs = (
        "remote process exited",
        "ncclremoteerror",
        "communicator was aborted",
        "connection closed by",
        "connection reset by",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


class Waitable(Protocol):
    """What can be waited for: work of `torch.distributed`."""

    def wait(self, timeout: timedelta = ...) -> Any: ...


class Watch:
    """One rank's part: tells where it stands, and waits on behalf of it.

    They talk over the store of the default process group. All but `at`, `wait` and `check` is done by a side thread.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        limit_seconds: float = LIMIT_SECONDS,
        beat_seconds: float = 0.5,
        name: str = "pipeline",
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._limit, self._beat = limit_seconds, beat_seconds
        # A client of its own: a store serves one call of a client at a time, and the main thread may be in one.
        self._store: Store = default_store().clone()  # type: ignore[attr-defined]
        # Of one name, each rank's first watch belongs with the first of the others, its second with their second.
        number = self._store.add(f"shardwise/{name}/watches/{rank}", 1)
        self._name = f"shardwise/{name}/{number}"
        self._place: object = "the start"
        self._moves = 0
        self._waits: tuple[tuple[int, ...], float] | None = None
        self._verdict: RankError | None = None
        self._others = tuple(other for other in range(num_ranks) if other != rank)
        #: Called after a wait, with what it was for, the peer, and when it began and ended.
        self.note: Callable[[object, int | None, float, float], None] | None = None
        #: Called when something has moved beside the computation: what, and when. By any thread.
        self.note_beside: Callable[[str, float, float], None] | None = None
        #: What it ends the waits of when a rank fails.
        self.guarded: list[dist.ProcessGroup | Pair] = []
        self._stopped, self._closed, self._hurry = threading.Event(), threading.Event(), threading.Event()
        #: Whether the caller knows that something went wrong: it raises, or has been told.
        self._told = threading.Event()
        self._gpu: DeviceProgress | None = None
        self._meeting = StoreMeeting(self._store, self._name, rank, num_ranks)
        self._board = Board(self._store, self._name, rank, num_ranks)
        self._thread = threading.Thread(target=self._look, name="shardwise-watch", daemon=True)
        self._thread.start()
        # Python ends a thread that comes back from a call of the store while the process ends, and C++ takes that for
        # a crash (exit code -6). So whoever forgets to close, or ends with an error, is closed for.
        atexit.register(self.close)

    @property
    def place(self) -> object:
        """Where this rank stands."""
        return self._place

    def at(self, place: object) -> None:
        """Say where this rank stands now, as a text or anything that prints as one; raises if another rank failed."""
        self._place = place
        self._moves += 1
        if self._verdict is not None:
            self.check()
        if self._gpu is not None:
            self._gpu.mark(place)

    def mark(self) -> None:
        """The same place, further on: its GPU has been asked for what the host is about to wait for."""
        if self._gpu is not None:
            self._gpu.mark(self._place)

    def follow(self, device: torch.device) -> None:
        """From now on this rank stands where its GPU stands, which may be behind its host: others are on NCCL too."""
        if self._gpu is None:
            self._gpu = DeviceProgress(device)

    def check(self) -> None:
        """Raise if another rank has failed, is gone, or holds everybody up."""
        if self._verdict is not None:
            self._told.set()
            raise RankError(self._verdict.problem, remedy=self._verdict.remedy, rank=self._verdict.rank)

    def wait(self, work: Waitable, what: object, peer: int | None = None) -> None:
        """Wait for work that rank `peer` has its part in; `what` is the instruction. Raises what went wrong instead.

        Without a peer it is a collective of all ranks, and all of them call it the same. Its group must be guarded.
        """
        self.at(what)
        self._waits = (self._others if peer is None else (peer,), time.monotonic())
        start = 0.0 if self.note is None else time.perf_counter()
        try:
            work.wait(_FOREVER)
        except RuntimeError as error:
            self.explain(error, peer)
        finally:
            self._waits = None
        if self.note is not None:
            self.note(what, peer, start, time.perf_counter())

    def wait_for(self, event: threading.Event, where: Callable[[], tuple[object, int] | None]) -> None:
        """The same, for an event of this process. `where` says at which instruction it hangs now, and on whom."""
        known: tuple[object, int] | None = None
        start, found = time.perf_counter(), where()
        while not event.wait(0.1):
            now = where()
            if now is not None and now != known:
                known = now
                self.at(now[0])
                self._waits = ((now[1],), time.monotonic())
            self.check()
        self._waits = None
        if self.note is not None and found is not None:
            self.note(*found, start, time.perf_counter())

    def wait_until(self, event: threading.Event, what: object, seconds: float) -> bool:
        """The same, for an event that all ranks have come to: whether it has happened in time."""
        self.at(what)
        deadline = time.monotonic() + seconds
        while not event.wait(0.05) and time.monotonic() < deadline:
            self.check()
        return event.is_set()

    def exchange(self, given: Any, what: object) -> list[Any]:
        """What each rank gives, by way of the store: no group is needed, and nobody is waited for that has failed.

        All ranks call it alike. One that comes late may have much to do before, and is no fault while it lives.
        """
        self.at(what)
        return self._meeting.exchange(given, self.check)

    @property
    def has_stopped(self) -> bool:
        """Whether it has broken all that it guards."""
        return self._stopped.is_set()

    def fail(self, error: BaseException) -> None:
        """Publish this rank's own error, so that the others stop with it. Another's that it raised is not its own."""
        if isinstance(error, RankError):
            return
        is_own = self._told.is_set() or isinstance(error, ShardwiseError)
        if not is_own and (self._verdict is not None or _is_of_another(error)):
            # What comes of communicators that another rank has left, or that were aborted, is not this rank's own.
            self.explain(error)
        self._told.set()
        stage, microbatch = getattr(self._place, "stage", None), getattr(self._place, "microbatch", None)
        details = "" if stage is None else f" (stage {stage}, microbatch {microbatch})"
        if stage is not None or not isinstance(error, ShardwiseError):  # A refusal says what it is about.
            error.add_note(f"at {self._place}{details}")
        self._publish(describe_failure(self.rank, error))

    def all_refuse(self) -> bool:
        """Whether all ranks refuse as this one does, for which they have time: all that is guarded can be used on."""
        return self._told.is_set() or self._meeting.all_refuse(self._limit, lambda: self._verdict is not None)

    def explain(self, error: BaseException, peer: int | None = None) -> NoReturn:
        """A connection broke: raise the reason. If nobody gives one in time, a rank died without a word."""
        self._hurry.set()
        alone = environment.place_under_torchrun() is not None
        if not self._stopped.wait(_SETTLE_ALONE_SECONDS if alone else _SETTLE_SECONDS):
            places = self._board.read(self._mine())
            if peer is None:
                peer = max(places, key=lambda place: (place.rank != self.rank, place.silent_seconds)).rank
            told = [f"rank {peer} is gone: its connection to rank {self.rank} broke at {self._place}"]
            told += [*map(str, places), f"({str(error).partition(chr(10))[0]})"]
            self._publish(RankError("\n  ".join(told), rank=peer))
            self._stopped.wait(_SETTLE_SECONDS)
        self.check()
        raise error

    def guard(self, group: dist.ProcessGroup | Pair) -> None:
        """End waits for work of this group, and with it all its connections, when a rank fails."""
        if group not in self.guarded:
            self.guarded.append(group)

    def close(self) -> None:
        """Stop looking. The rank stands at the end from now on. Where the store no longer answers, that is all."""
        self._place, self._moves = "the end", self._moves + 1
        self._closed.set()
        self._hurry.set()
        self._thread.join(_SETTLE_SECONDS)
        atexit.unregister(self.close)

    def _publish(self, error: RankError) -> None:
        """The first one wins; later ones are what came of it."""
        try:
            if self._store.add(f"{self._name}/failures", 1) == 1:
                self._store.set(f"{self._name}/failed", encode(error))
        except RuntimeError:
            self._stop(error)
        self._hurry.set()

    def _mine(self) -> RankLocation:
        waits, behind = self._waits, None if self._gpu is None else self._gpu.behind()
        if waits is None and behind is not None:
            # Since when is seen by the number: it changes as long as the GPU moves on.
            return replace(self._board.mine(behind[1], -2 - behind[0], self._others), on_gpu=True)
        return self._board.mine(self._place, self._moves, waits[0] if waits else ())

    def _look(self) -> None:
        while not self._closed.is_set() and self._verdict is None:
            try:
                self._tick()
            except RuntimeError as error:  # Also what torch raises when the store does not answer.
                why = str(error).partition("\n")[0]
                self._stop(RankError(f"rank {self.rank} lost the store that the ranks share ({why})"))
            hurried = self._hurry.is_set() and self._verdict is None
            if hurried:
                self._closed.wait(0.02)
            else:
                self._hurry.wait(self._beat)
        # A wait that begins while connections are broken may escape: it is ended in the next second.
        while self._verdict is not None and not self._told.is_set() and not self._closed.wait(1.0):
            break_all(self.guarded, again=True)
        if self._closed.is_set() and self._verdict is None:
            with contextlib.suppress(RuntimeError):  # The rank that has the store may have ended before this one.
                self._board.write(self._mine())

    def _tick(self) -> None:
        mine = self._mine()
        self._board.write(mine)
        verdict = self._find_failure()
        stays = mine.at_seconds > 2 * self._beat
        if self._gpu is not None and stays and not mine.waits_for:
            self._gpu.ask()  # Its host may wait for it where nothing says so.
        if verdict is None and stays and mine.waits_for:
            stall = find_stall(self._board.read(mine), self.rank, self._limit)
            if stall is not None:
                self._publish(stall)
                verdict = self._find_failure() or stall
        if verdict is not None:
            self._stop(verdict)

    def _find_failure(self) -> RankError | None:
        for key in (LOST, f"{self._name}/failed"):
            if self._store.check([key]):
                return decode(self._store.get(key))
        return None

    def _stop(self, verdict: RankError) -> None:
        self._verdict = verdict
        self._stopped.set()
        break_all(self.guarded)
        if self._gpu is not None:
            self._see_off(verdict, self._gpu)

    def _see_off(self, verdict: RankError, gpu: DeviceProgress) -> None:
        """Wait until the host knows. If it does not come back, from a GPU that stands still or from NCCL itself, end
        this process: nothing else can."""
        start = time.monotonic()
        while time.monotonic() - start < (_LEAVE_SECONDS if gpu.behind() is not None else _LEAVE_AT_LAST):
            if self._told.wait(0.1) or self._closed.is_set():
                return
        with contextlib.suppress(RuntimeError):
            self._store.set(LAST_WORD, encode(verdict))
        sys.stderr.write(f"error: {verdict}\n")
        sys.stderr.flush()
        os._exit(STATUS_OF_LAST_WORD)


@contextlib.contextmanager
def asking(watch: Watch, peer: int) -> Iterator[None]:
    """What a host asks of its GPU may hold it up too, as long as rank `peer` does not do its part there."""
    watch._waits = ((peer,), time.monotonic())
    try:
        yield
    finally:
        watch._waits = None


def last_place(store: Store, rank: int, name: str = "pipeline") -> str | None:
    """The key under which the last watch of that name of a rank tells where it stands, if there is one."""
    counted = f"shardwise/{name}/watches/{rank}"
    return f"shardwise/{name}/{store.add(counted, 0)}/place/{rank}" if store.check([counted]) else None


def default_store() -> Store:
    """The store of the default process group, without the prefix of that group."""
    return store_of_faults(torch_private.default_store())


def store_of_faults(store: Store) -> Store:
    """A store as faults are told in it, without prefixes of groups.

    Each attempt at a run has names of its own there: what failed in the last is no news in this.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    attempt = environment.attempt_name()
    return PrefixStore(f"faults of attempt {attempt}", store) if attempt else store


def check_before(watch: Watch) -> None:
    """Raise if this rank has failed before, whether or not it is told yet whose error counts: what connects it with
    others is being ended, and whoever caught the error goes on."""
    if watch._told.is_set():
        watch._stopped.wait(_SETTLE_SECONDS)
        watch.check()
