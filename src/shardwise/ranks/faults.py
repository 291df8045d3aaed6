"""What ranks tell each other so that none of them waits in vain: where each one stands, and what went wrong.

Every rank has a `Watch`. Its side thread writes to the store that the ranks share, twice a second, where the rank
stands, and looks there for errors of others. Then there are three ways for a wait to end early:

    a rank raises       it publishes its error first; the others stop with that error, not with "connection closed"
    a rank dies         its connections break, or the process that started it says so; the others say who is gone
    a rank stalls       the others look whom they wait for, whom that one waits for, and so on; whoever stands at the
                        end of that chain and has neither moved nor answered for `limit_seconds` is named

A rank that waits for long because another one is busy, and moves on, is no fault. A wait cannot be polled (gloo's work
says that it is complete only after it was waited for), so the side thread breaks the connections, and that ends it.
"""

import atexit
import contextlib
import json
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from shardwise import environment, torch_private
from shardwise.errors import ShardwiseError
from shardwise.ranks.shared_memory import Pair
from shardwise.torch_private import PrefixStore, Store

#: Where the process that started the ranks writes that one of them died.
LOST = "shardwise/lost"
#: How long a rank may be at one instruction, or silent, before it is named as the one that holds up the others.
LIMIT_SECONDS = 20.0
# Waits end by being broken, not by themselves: gloo closes every connection of a group when one wait times out.
_FOREVER = timedelta(days=1)
_A_MOMENT = timedelta(milliseconds=1)
_TAG_OF_NOTHING = 987_654
# How long a broken connection may wait for the reason why it broke.
_SETTLE_SECONDS = 3.0


class RankError(ShardwiseError):
    """Another process failed: `rank` is the one that did, or that is missing."""

    def __init__(self, problem: str, *, remedy: str | None = None, rank: int | None = None) -> None:
        super().__init__(problem, remedy=remedy)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return partial(RankError, remedy=self.remedy, rank=self.rank), (self.problem,)


def describe_failure(rank: int, error: BaseException) -> RankError:
    """What a rank's own error is to everyone else: its rank, where it stood, its text and its traceback."""
    place = next((f" {note}" for note in getattr(error, "__notes__", ()) if note.startswith("at ")), "")
    problem = error.problem if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
    story = "".join(traceback.format_exception(error)).rstrip().replace("\n", "\n    ")
    remedy = error.remedy if isinstance(error, ShardwiseError) else None
    return RankError(f"rank {rank} failed{place}: {problem}\n    {story}", remedy=remedy, rank=rank)


def encode(error: RankError) -> str:
    """An error as it stands in the store."""
    return json.dumps({"problem": error.problem, "remedy": error.remedy, "rank": error.rank})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """Where a rank stands: since when, for whom it waits, and how long it has given no sign of life.

    It waits for one rank to send or to receive, or for several to come to the same place: a collective.
    """

    rank: int
    at: str
    at_seconds: float = 0.0
    silent_seconds: float = 0.0
    waits_for: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.waits_for:
            return f"rank {self.rank} waits for {_ranks(self.waits_for)} at {self.at} ({self.at_seconds:.0f} s)"
        return f"rank {self.rank} was last at {self.at} ({self.at_seconds:.0f} s)"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def find_stall(places: Sequence[RankLocation], me: int, limit_seconds: float) -> RankError | None:
    """Say who holds up rank `me`, if anybody: follow who waits for whom, to one that has not moved for too long."""
    found = _find_culprit(places, [me], limit_seconds)
    if found is None:
        return None
    culprit, problem = found
    return RankError(
        "\n  ".join([problem, *map(str, places)]),
        remedy=f"limit_seconds={3 * limit_seconds:g}, if rank {culprit} is only slow",
        rank=culprit,
    )


def _find_culprit(places: Sequence[RankLocation], chain: list[int], limit_seconds: float) -> tuple[int, str] | None:
    """The rank at fault and what is wrong with it. Each of `chain` waits for the next."""
    place = places[chain[-1]]
    if place.silent_seconds >= limit_seconds:
        problem = f"rank {place.rank} has not answered for {place.silent_seconds:.0f} s; it was last at {place.at}"
        return place.rank, problem
    if not place.waits_for:
        if place.at_seconds < limit_seconds:
            return None
        return place.rank, f"rank {place.rank} has been at {place.at} for {place.at_seconds:.0f} s"
    for other in place.waits_for:
        if len(place.waits_for) > 1 and places[other].at == place.at:
            continue  # It has come to the collective too.
        if other in chain:
            circle = sorted(chain[chain.index(other) :])
            shortest = min(places[rank].at_seconds for rank in circle)
            quiet = max((places[rank] for rank in circle), key=lambda each: each.silent_seconds)
            if shortest >= limit_seconds and quiet.silent_seconds >= limit_seconds / 2:
                # It says that it waits because it was stopped while it did. Its silence is counted from the first look.
                problem = (
                    f"rank {quiet.rank} has not answered for {quiet.silent_seconds:.0f} s; it was last at {quiet.at}"
                )
                return quiet.rank, problem
            if shortest >= limit_seconds:
                return other, f"{_ranks(circle)} have waited for each other for {shortest:.0f} s"
            continue
        found = _find_culprit(places, [*chain, other], limit_seconds)
        if found is not None:
            return found
    return None


class Waitable(Protocol):
    """What can be waited for: work of `torch.distributed`."""

    def wait(self, timeout: timedelta = ...) -> Any: ...


class Watch:
    """One rank's part: tells where it stands, and waits on behalf of it.

    They talk over the store of the default process group. Everything but `at`, `wait` and `check` happens in a side
    thread.
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
        self._board = _Board(self._store, self._name, rank, num_ranks)
        self._thread = threading.Thread(target=self._look, name="shardwise-watch", daemon=True)
        self._thread.start()
        # Python ends a thread that comes back from a call of the store while the process ends, and C++ takes that for
        # a crash (exit code -6). So whoever forgets to close, or ends with an error, is closed for.
        atexit.register(self.close)

    def at(self, place: object) -> None:
        """Say where this rank stands now, as a text or anything that prints as one; raises if another rank failed."""
        self._place = place
        self._moves += 1
        if self._verdict is not None:
            self.check()

    def check(self) -> None:
        """Raise if another rank has failed, is gone, or holds everybody up."""
        if self._verdict is not None:
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

    def fail(self, error: BaseException) -> None:
        """Publish this rank's own error, so that the others stop with it. Another's that it raised is not its own."""
        if isinstance(error, RankError):
            return
        stage, microbatch = getattr(self._place, "stage", None), getattr(self._place, "microbatch", None)
        details = "" if stage is None else f" (stage {stage}, microbatch {microbatch})"
        error.add_note(f"at {self._place}{details}")
        self._publish(describe_failure(self.rank, error))

    def explain(self, error: BaseException, peer: int | None = None) -> NoReturn:
        """A connection broke: raise the reason. If nobody gives one in time, a rank died without a word."""
        self._hurry.set()
        if not self._stopped.wait(_SETTLE_SECONDS):
            places = self._board.read(self._mine())
            if peer is None:
                peer = max(places, key=lambda place: place.silent_seconds).rank
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
        waits = self._waits
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
        if self._closed.is_set() and self._verdict is None:
            with contextlib.suppress(RuntimeError):  # The rank that has the store may have ended before this one.
                self._board.write(self._mine())

    def _tick(self) -> None:
        mine = self._mine()
        self._board.write(mine)
        verdict = self._find_failure()
        waits = self._waits
        if verdict is None and waits is not None and time.monotonic() - waits[1] > 2 * self._beat:
            stall = find_stall(self._board.read(mine), self.rank, self._limit)
            if stall is not None:
                self._publish(stall)
                verdict = self._find_failure() or stall
        if verdict is not None:
            self._stop(verdict)

    def _find_failure(self) -> RankError | None:
        for key in (LOST, f"{self._name}/failed"):
            if self._store.check([key]):
                return RankError(**json.loads(self._store.get(key)))
        return None

    def _stop(self, verdict: RankError) -> None:
        self._verdict = verdict
        self._stopped.set()
        for group in self.guarded:
            _break(group)


class _Board:
    """The places of all ranks in the store. Clocks of machines differ, so only the reader's own clock is used:
    a rank has been silent since the reader last saw its place change, and a place changes with every beat."""

    def __init__(self, store: Store, name: str, rank: int, num_ranks: int) -> None:
        self._store, self._rank = store, rank
        self._keys = [f"{name}/place/{other}" for other in range(num_ranks)]
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._beats = 0
        self._moved = (-1, time.monotonic())

    def mine(self, place: object, moves: int, waits_for: tuple[int, ...]) -> RankLocation:
        now = time.monotonic()
        if moves != self._moved[0]:
            self._moved = (moves, now)
        return RankLocation(rank=self._rank, at=str(place), at_seconds=now - self._moved[1], waits_for=waits_for)

    def write(self, mine: RankLocation) -> None:
        self._beats += 1
        record = {"beat": self._beats, "at": mine.at, "at_seconds": mine.at_seconds, "waits_for": mine.waits_for}
        self._store.set(self._keys[self._rank], json.dumps(record))

    def read(self, mine: RankLocation) -> list[RankLocation]:
        return [mine if rank == self._rank else self._read(rank) for rank in range(len(self._keys))]

    def _read(self, rank: int) -> RankLocation:
        now = time.monotonic()
        found = self._store.get(self._keys[rank]) if self._store.check([self._keys[rank]]) else b""
        if rank not in self._seen or self._seen[rank][0] != found:
            self._seen[rank] = (found, now)
        silent = now - self._seen[rank][1]
        if not found:
            return RankLocation(rank=rank, at="nothing yet", at_seconds=silent, silent_seconds=silent)
        record = json.loads(found)
        at_seconds, waits_for = record["at_seconds"] + silent, tuple(record["waits_for"])
        return RankLocation(
            rank=rank, at=record["at"], at_seconds=at_seconds, silent_seconds=silent, waits_for=waits_for
        )


def _break(group: dist.ProcessGroup | Pair) -> None:
    """End every wait under way in a group. NCCL has a call for that. Of gloo one knows that when a wait times out, it
    closes all connections of the group; so one is made to, for what nobody ever sends."""
    with contextlib.suppress(RuntimeError):
        if not isinstance(group, dist.ProcessGroup):
            group.sever()
        elif dist.get_backend(group) == "nccl":
            group.abort()
        elif group.size() > 1:
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _TAG_OF_NOTHING).wait(_A_MOMENT)


def default_store() -> Store:
    """The store of the default process group, without the prefix of that group."""
    return store_of_faults(torch_private.default_store())


def store_of_faults(store: Store) -> Store:
    """A store as faults are told in it, without prefixes of groups.

    Each attempt at a run has names of its own there: what failed in the last is no news in this.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    attempt = environment.num_restarts()
    return PrefixStore(f"faults of attempt {attempt}", store) if attempt else store
