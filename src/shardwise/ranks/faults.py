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

#: How long a rank may be at one instruction, or silent, before it is named as the one that holds up the others.
LIMIT_SECONDS = 20.0
# Waits end by being broken, not by themselves: gloo closes every connection of a group when one wait times out.
_FOREVER = timedelta(days=1)
# How long a broken connection waits for the reason under `torchrun`, where nobody but a rank itself gives one, and does
# so before its connections close: who was killed says nothing, and the ranks that are left are waited for. A process
# that started ranks takes longer to tell.
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


class Waitable(Protocol):
    """What can be waited for: work of `torch.distributed`."""

    def wait(self, timeout: timedelta = ...) -> Any: ...


class Watch:
    """One rank's part: tells where it stands, and waits on behalf of it.

    They talk over the store of the default process group. What others do is looked at by a side thread (`Lookout`).
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
        # A client of its own: a store serves one call of a client at a time, and the main thread may be in one.
        store: Store = default_store().clone()  # type: ignore[attr-defined]
        # Of one name, each rank's first watch belongs with the first of the others, its second with their second.
        number = store.add(f"shardwise/{name}/watches/{rank}", 1)
        name = f"shardwise/{name}/{number}"
        self._others = tuple(other for other in range(num_ranks) if other != rank)
        #: Called after a wait, with what it was for, the peer, and when it began and ended.
        self.note: Callable[[object, int | None, float, float], None] | None = None
        #: Called when something has moved beside the computation: what, and when. By any thread.
        self.note_beside: Callable[[str, float, float], None] | None = None
        self._meeting = StoreMeeting(store, name, rank, num_ranks)
        self._lookout = Lookout(store, name, rank, num_ranks, limit=limit_seconds, beat=beat_seconds)
        # Python ends a thread that comes back from a call of the store while the process ends, and C++ takes that for
        # a crash (exit code -6). So whoever forgets to close, or ends with an error, is closed for.
        atexit.register(self.close)

    @property
    def place(self) -> object:
        """Where this rank stands."""
        return self._lookout.place

    @property
    def guarded(self) -> list[dist.ProcessGroup | Pair]:
        """What it ends the waits of when a rank fails."""
        return self._lookout.guarded

    def at(self, place: object) -> None:
        """Say where this rank stands now, as a text or anything that prints as one; raises if another rank failed."""
        lookout = self._lookout
        lookout.move(place)
        if lookout.verdict is not None:
            self.check()
        if lookout.gpu is not None:
            lookout.gpu.mark(place)

    def mark(self) -> None:
        """The same place, further on: its GPU has been asked for what the host is about to wait for."""
        if self._lookout.gpu is not None:
            self._lookout.gpu.mark(self.place)

    def follow(self, device: torch.device) -> None:
        """From now on this rank stands where its GPU stands, which may be behind its host: others are on NCCL too."""
        self._lookout.follow(device)

    def check(self) -> None:
        """Raise if another rank has failed, is gone, or holds everybody up."""
        verdict = self._lookout.verdict
        if verdict is not None:
            self._lookout.told.set()
            raise RankError(verdict.problem, remedy=verdict.remedy, rank=verdict.rank)

    def check_before(self) -> None:
        """Raise if this rank has failed before, whether or not it is told yet whose error counts: what connects it with
        others is being ended, and whoever caught the error goes on."""
        if self._lookout.told.is_set():
            self._lookout.stopped.wait(SETTLE_SECONDS)
            self.check()

    @contextmanager
    def asking(self, peer: int) -> Iterator[None]:
        """What a host asks of its GPU may hold it up too, as long as rank `peer` does not do its part there."""
        self._lookout.waits_for = (peer,)
        try:
            yield
        finally:
            self._lookout.waits_for = ()

    def wait(self, work: Waitable, what: object, peer: int | None = None) -> None:
        """Wait for work that rank `peer` has its part in; `what` is the instruction. Raises what went wrong instead.

        Without a peer it is a collective of all ranks, and all of them call it the same. Its group must be guarded.
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
        """The same, for an event of this process. `where` says at which instruction it hangs now, and on whom."""
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
        return self._lookout.stopped.is_set()

    def fail(self, error: BaseException) -> None:
        """Publish this rank's own error, so that the others stop with it. Another's that it raised is not its own."""
        if isinstance(error, RankError):
            return
        lookout, place = self._lookout, self.place
        is_own = lookout.told.is_set() or isinstance(error, ShardwiseError)
        if not is_own and (lookout.verdict is not None or _is_of_another(error)):
            # What comes of communicators that another rank has left, or that were aborted, is not this rank's own.
            self.explain(error)
        lookout.told.set()
        stage, microbatch = getattr(place, "stage", None), getattr(place, "microbatch", None)
        details = "" if stage is None else f" (stage {stage}, microbatch {microbatch})"
        if stage is not None or not isinstance(error, ShardwiseError):  # A refusal says what it is about.
            error.add_note(f"at {place}{details}")
        lookout.publish(describe_failure(self.rank, error))

    def all_refuse(self) -> bool:
        """Whether all ranks refuse as this one does, for which they have time: all that is guarded can be used on."""
        lookout = self._lookout
        return lookout.told.is_set() or self._meeting.all_refuse(self._limit, lambda: lookout.verdict is not None)

    def explain(self, error: BaseException, peer: int | None = None) -> NoReturn:
        """A connection broke: raise the reason. If nobody gives one in time, a rank died without a word."""
        alone = environment.place_under_torchrun() is not None
        if not self._lookout.settle(_SETTLE_ALONE_SECONDS if alone else SETTLE_SECONDS):
            places = self._lookout.places()
            if peer is None:
                peer = max(places, key=lambda place: (place.rank != self.rank, place.silent_seconds)).rank
            told = [f"rank {peer} is gone: its connection to rank {self.rank} broke at {self.place}"]
            told += [*map(str, places), f"({str(error).partition(chr(10))[0]})"]
            self._lookout.publish(RankError("\n  ".join(told), rank=peer))
            self._lookout.settle(SETTLE_SECONDS)
        self.check()
        raise error

    def guard(self, group: dist.ProcessGroup | Pair) -> None:
        """End waits for work of this group, and with it all its connections, when a rank fails."""
        if group not in self.guarded:
            self.guarded.append(group)

    def close(self) -> None:
        """Stop looking. The rank stands at the end from now on. Where the store no longer answers, that is all."""
        self._lookout.move("the end")
        self._lookout.close()
        atexit.unregister(self.close)


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
