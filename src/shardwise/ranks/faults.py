"""Fault detection: ranks report where they stand and what went wrong, so that no rank waits forever.

Every rank has a `Watch`. Twice a second, its side thread writes to the shared store where the rank stands, and looks
there for errors of other ranks. A wait can end early in three ways:

    a rank raises       it publishes its error first; the others stop with that error, not with "connection closed"
    a rank dies         its connections break, or the process that started it reports it; the others name it
    a rank stalls       the others follow the chain of waits, from the rank they wait for to the one it waits for, and
                        so on; the rank at its end is named if it has neither moved nor answered for `limit_seconds`

A long wait for a rank that is busy and makes progress is no fault. A wait cannot be polled (gloo's work reports
completion only after it was waited for), so the side thread breaks the connections, which ends the wait.

With NCCL the GPU waits, and its host continues until it reads a number. A rank then stands where its GPU stands
(`device_progress.py`), which waits for the ranks that are missing. Communicators are aborted, so no kernel remains. If
a host still does not return (creating a communicator cannot be interrupted), its process is ended, with the error on
stderr and in the store.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from shardwise import environment, torch_private
from shardwise.errors import ShardwiseError
from shardwise.ranks.lookout import SETTLE_SECONDS, Lookout
from shardwise.ranks.rank_error import RankError, describe_failure
from shardwise.ranks.shared_memory import Pair
from shardwise.ranks.store_meeting import StoreMeeting
from shardwise.torch_private import PrefixStore, Store

#: How long a rank may stay at one instruction, or be silent, before it is reported as stalled.
LIMIT_SECONDS = 20.0
# Waits have no timeout of their own: gloo closes every connection of a group when one wait times out.
_FOREVER = timedelta(days=1)
# How long a broken connection waits for the reason under `torchrun`. There only a rank itself gives one, and does so
# before its connections close: a killed rank gives none, and the remaining ranks are waited for. A process that
# started ranks takes longer to report.
_SETTLE_ALONE_SECONDS = 1.0


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


def _error_at_end() -> BaseException | None:
    """Return the error of the script that closes its engine, or ends this process: one of this rank alone, perhaps."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    is_own = isinstance(error, Exception) and not isinstance(error, RankError)
    return error if is_own else None


class Waitable(Protocol):
    """Something that can be waited for: work of `torch.distributed`."""

    def wait(self, timeout: timedelta = ...) -> Any: ...


class Watch:
    """The watch of one rank: reports where it stands, and performs its waits.

    Watches communicate over the store of the default process group. A side thread (`Lookout`) observes the others.
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
        self._limit = limit_seconds
        # A separate client: a store serves one call of a client at a time, and the main thread may be in one.
        store: Store = default_store().clone()  # type: ignore[attr-defined]
        # Watches of one name are matched by their number: each rank's first with the others' first, and so on.
        number = store.add(f"shardwise/{name}/watches/{rank}", 1)
        name = f"shardwise/{name}/{number}"
        self._others = tuple(other for other in range(num_ranks) if other != rank)
        #: Called after a wait, with its object, its peer, and its start and end.
        self.note: Callable[[object, int | None, float, float], None] | None = None
        #: Called by any thread after data moved beside computation, with a name, start and end.
        self.note_beside: Callable[[str, float, float], None] | None = None
        self._meeting = StoreMeeting(store, name, rank, num_ranks)
        self._lookout = Lookout(store, name, rank, num_ranks, limit=limit_seconds, beat=beat_seconds)
        # Close at exit, also after an error: if a thread returns from a call of the store while the process ends,
        # Python ends the thread, and C++ takes that for a crash (exit code -6).
        atexit.register(self.close)

    @property
    def place(self) -> object:
        """The current place of this rank."""
        return self._lookout.place

    @property
    def guarded(self) -> list[dist.ProcessGroup | Pair]:
        """The groups and pairs whose waits are ended when a rank fails."""
        return self._lookout.guarded

    def at(self, place: object) -> None:
        """Report where this rank stands now, as any object with a text; raise if another rank failed."""
        lookout = self._lookout
        lookout.move(place)
        if lookout.verdict is not None:
            self.check()
        if lookout.gpu is not None:
            lookout.gpu.mark(place)

    def mark(self) -> None:
        """Report progress at the same place: the host is about to wait for work that it has launched on its GPU."""
        if self._lookout.gpu is not None:
            self._lookout.gpu.mark(self.place)

    def follow(self, device: torch.device) -> None:
        """Report from now on where the GPU stands, which may be behind its host: ranks wait on NCCL there."""
        self._lookout.follow(device)

    def check(self) -> None:
        """Raise if another rank has failed, is gone, or stalls."""
        verdict = self._lookout.verdict
        if verdict is not None:
            self._lookout.told.set()
            raise RankError(verdict.problem, remedy=verdict.remedy, rank=verdict.rank)

    def check_before(self) -> None:
        """Raise if this rank has failed before, even if the verdict is not known yet: its connections are being
        closed, and the caller has caught the error and continued."""
        if self._lookout.told.is_set():
            self._lookout.stopped.wait(SETTLE_SECONDS)
            self.check()

    @contextmanager
    def asking(self, *peers: int, patience: float = 1.0) -> Iterator[None]:
        """Mark calls that may block until these ranks do their part, such as host calls to the GPU. The rank stays
        where it is; that it comes to such a call, and leaves it, is progress. `patience` is a multiple of the limit."""
        lookout = self._lookout
        lookout.move(lookout.place)
        lookout.waits_for, lookout.patience = peers, patience
        try:
            yield
        finally:
            lookout.move(lookout.place)
            lookout.waits_for, lookout.patience = (), 1.0

    def wait(self, work: Waitable, what: object, peer: int | None = None) -> None:
        """Wait for work that involves rank `peer`; `what` is the instruction. Raise if a rank fails meanwhile.

        Without a peer it is a collective of all ranks, and all give the same `what`. Its group must be guarded.
        """
        self.at(what)
        self._lookout.waits_for = self._others if peer is None else (peer,)
        start = 0.0 if self.note is None else time.perf_counter()
        try:
            work.wait(_FOREVER)
        except RuntimeError as error:
            self.explain(error, peer)
        finally:
            self._lookout.waits_for = ()
        if self.note is not None:
            self.note(what, peer, start, time.perf_counter())

    def wait_for(self, event: threading.Event, where: Callable[[], tuple[object, int] | None]) -> None:
        """Wait for an event of this process. `where` returns the instruction and the rank that it now waits for."""
        known: tuple[object, int] | None = None
        start, found = time.perf_counter(), where()
        while not event.wait(0.1):
            now = where()
            if now is not None and now != known:
                known = now
                self.at(now[0])
                self._lookout.waits_for = (now[1],)
            self.check()
        self._lookout.waits_for = ()
        if self.note is not None and found is not None:
            self.note(*found, start, time.perf_counter())

    def wait_until(self, event: threading.Event, what: object, seconds: float) -> bool:
        """Wait for an event that all ranks have reached, and return whether it happened in time."""
        self.at(what)
        deadline = time.monotonic() + seconds
        while not event.wait(0.05) and time.monotonic() < deadline:
            self.check()
        return event.is_set()

    def exchange(self, given: Any, what: object) -> list[Any]:
        """Gather an object from each rank over the store: this needs no group, and does not wait for failed ranks.

        All ranks call it alike. A rank that comes late may be busy, and is no fault while it lives.
        """
        self.at(what)
        return self._meeting.exchange(given, self.check)

    @property
    def has_stopped(self) -> bool:
        """Whether all guarded connections are broken."""
        return self._lookout.stopped.is_set()

    def fail(self, error: BaseException) -> None:
        """Publish this rank's error, so that the others stop with it, unless it stems from another rank."""
        if isinstance(error, RankError):
            return
        lookout, place = self._lookout, self.place
        is_own = lookout.told.is_set() or isinstance(error, ShardwiseError)
        if not is_own and (lookout.verdict is not None or _is_of_another(error)):
            # Errors of communicators that another rank has left, or that were aborted, are not this rank's own.
            self.explain(error)
        lookout.told.set()
        stage, microbatch = getattr(place, "stage", None), getattr(place, "microbatch", None)
        details = "" if stage is None else f" (stage {stage}, microbatch {microbatch})"
        if stage is not None or not isinstance(error, ShardwiseError):  # A refusal explains itself.
            error.add_note(f"at {place}{details}")
        lookout.publish(describe_failure(self.rank, error))

    def all_refuse(self) -> bool:
        """Wait, up to the limit, and return whether all ranks refuse like this one: then connections stay usable."""
        lookout = self._lookout
        return lookout.told.is_set() or self._meeting.all_refuse(self._limit, lambda: lookout.verdict is not None)

    def explain(self, error: BaseException, peer: int | None = None) -> NoReturn:
        """Raise the reason of a broken connection. If none is published in time, a rank died silently."""
        alone = environment.place_under_torchrun() is not None
        if not self._lookout.settle(_SETTLE_ALONE_SECONDS if alone else SETTLE_SECONDS):
            self._lookout.publish(self._lookout.find_left() or self._gone(error, peer))
            self._lookout.settle(SETTLE_SECONDS)
        self.check()
        raise error

    def _gone(self, error: BaseException, peer: int | None) -> RankError:
        """Return the error of a rank that left nothing but a broken connection."""
        places = self._lookout.places()
        if peer is None:
            peer = max(places, key=lambda place: (place.rank != self.rank, place.silent_seconds)).rank
        told = [f"rank {peer} is gone: its connection to rank {self.rank} broke at {self.place}"]
        told += [*map(str, places), f"({str(error).partition(chr(10))[0]})"]
        return RankError("\n  ".join(told), rank=peer)

    def guard(self, group: dist.ProcessGroup | Pair) -> None:
        """End waits for work of this group, and with it all its connections, when a rank fails."""
        if group not in self.guarded:
            self.guarded.append(group)

    def close(self) -> None:
        """Stop the side thread and report the end, and the error that is its reason, unless the store no longer
        answers."""
        self._lookout.move("the end")
        error = _error_at_end()
        if error is not None and not self._lookout.told.is_set():
            self._lookout.leave(describe_failure(self.rank, error))
        self._lookout.close()
        atexit.unregister(self.close)


def last_place(store: Store, rank: int, name: str = "pipeline") -> str | None:
    """Return the key under which the last watch of that name of a rank reports its place, if there is one."""
    counted = f"shardwise/{name}/watches/{rank}"
    return f"shardwise/{name}/{store.add(counted, 0)}/place/{rank}" if store.check([counted]) else None


def default_store() -> Store:
    """Return the store of the default process group, without the group's prefix."""
    return store_of_faults(torch_private.default_store())


def store_of_faults(store: Store) -> Store:
    """Return the store for fault reports, without prefixes of groups.

    Each attempt at a run has its own names there: failures of the last one must not be seen in this one.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    attempt = environment.attempt_name()
    return PrefixStore(f"faults of attempt {attempt}", store) if attempt else store
