"""A heartbeat of every process, so that no rank waits forever for one that is gone, wherever it waits.

A `Watch` covers the engine, and reports at which instruction a rank stands. Other code waits for ranks too: creating
groups, gathering objects, checkpoints written in parts by each rank. So from before a process joins the others until
its end, a thread of it increments a counter in the shared store, and observes the next rank's counter. A process that
is stopped, or whose machine is gone, stops counting; one that is slow, or waits itself, does not.

    rank 0 --looks at--> rank 1 --looks at--> rank 2 --looks at--> rank 0

A rank that sees the next one silent for too long reports it in the store. Every `Watch` finds the report there, and
ends the waits that it guards. A process that has not ended shortly after is in an unguarded wait, and is ended.
"""

import atexit
import faulthandler
import json
import os
import re
import signal
import struct
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from shardwise.ranks.faults import LIMIT_SECONDS, last_place
from shardwise.ranks.lookout import LOST
from shardwise.ranks.rank_error import RankError, decode, encode
from shardwise.torch_private import Store

#: Where a silent rank is reported.
SILENT = "shardwise/silent"
#: Longer than the limit of a watch, which reports more, and observes a rank only after waiting for it for a moment.
#: With what follows, other ranks know of it within 30 s.
SILENT_SECONDS = LIMIT_SECONDS + 3.0
#: The time that a process has to end by itself, after a rank was found to be silent.
_END_SECONDS = 2.0
_BEAT_SECONDS = 1.0
_SETTLE_SECONDS = 3.0
_ENDED = "ended"
_OURS = Path(__file__).parents[1]
_FRAME = re.compile(r'^  File "(.*)", line .* in (.*)$', re.MULTILINE)


class Pulse:
    """The heartbeat of one process, until it ends. `tells`: it reports on stderr why it is ended."""

    def __init__(
        self, store: Store, rank: int, num_ranks: int, *, limit_seconds: float = SILENT_SECONDS, tells: bool = False
    ) -> None:
        # A separate client, as for a watch.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._num_ranks, self._limit, self._tells = rank, num_ranks, limit_seconds, tells
        self._beat = min(_BEAT_SECONDS, limit_seconds / 4)
        self._next = Silence(self._store, (rank + 1) % num_ranks, limit_seconds)
        self._closed = threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._live, name="shardwise-pulse", daemon=True)
        self._thread.start()
        # As for a watch: a thread that returns from a call of the store while Python ends is taken for a crash.
        atexit.register(self.close)

    def close(self) -> None:
        """Report that this process has ended."""
        self._closed.set()
        self._thread.join(_SETTLE_SECONDS)
        atexit.unregister(self.close)

    def _live(self) -> None:
        number = 0
        try:
            while not self._closed.wait(self._beat if number else 0.0):
                number += 1
                self._store.set(key_of(self._rank), json.dumps([number, self._place()]))
                if self._next.is_too_long():
                    self._say()
                if self._next.has_ended:  # Then observe the one after it.
                    self._next = Silence(self._store, (self._next.rank + 1) % self._num_ranks, self._limit)
                if self._store.check([SILENT]):
                    self._end()
            self._store.set(key_of(self._rank), json.dumps([_ENDED, ""]))
        except RuntimeError:
            return  # The store is gone, and with it the launcher of the ranks.

    def _say(self) -> None:
        """Report the silent rank to all. The first report wins."""
        if self._store.add(f"{SILENT}/found", 1) == 1:
            told = encode(self._next.error())
            self._store.set(LOST, told)
            self._store.set(SILENT, told)

    def _end(self) -> None:
        """End this process, because a rank is silent, unless it ends by itself in time."""
        if self._closed.wait(_END_SECONDS):
            return
        if self._tells:
            error = decode(self._store.get(SILENT))
            text = f"error: rank {self._rank} ends, at {self._place()}: {error}\n"
            os.write(2, text.encode())
        os._exit(1)

    def _place(self) -> str:
        """Return where the main thread is, in our own files."""
        with tempfile.TemporaryFile() as file:
            # Not from `sys._current_frames`: up to Python 3.11 it creates objects while it holds a lock of all threads.
            # If the garbage collector runs then and frees an object that needs that lock, no thread ever runs again.
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return place_in(file.read().decode(errors="replace"), self._main or 0)


def place_in(stacks: str, thread: int) -> str:
    """Return where a thread is, in our own files, from `faulthandler`'s dump of all threads."""
    _, _, stack = stacks.partition(f"hread 0x{thread:0{2 * struct.calcsize('P')}x} ")
    for file, function in _FRAME.findall(stack.partition("\n\n")[0]):
        path = Path(file)
        if path.is_relative_to(_OURS) and path.parent.name != "ranks":
            return f"{path.relative_to(_OURS)}, {function}"
    return "the start or the end"


class Silence:
    """How long a rank has been silent, by the observer's clock: clocks of machines differ."""

    def __init__(self, store: Store, rank: int, limit_seconds: float) -> None:
        self.rank, self.has_ended = rank, False
        self._store, self._limit, self._place = store, limit_seconds, "nothing yet"
        self._seen: bytes | None = None
        self._since = self._looked = time.monotonic()

    def is_too_long(self) -> bool:
        """Check whether its counter has changed, and return whether it has been the same for too long.

        A rank that has not joined yet may be slow to start, and has three times as long; a stopped one has half.
        """
        found = self._store.get(key_of(self.rank)) if self._store.check([key_of(self.rank)]) else None
        now = time.monotonic()
        # An observer that was stopped itself, or could not reach the store, has not observed anything meanwhile.
        if found != self._seen or now - self._looked > self._limit / 2:
            self._seen, self._since = found, now
        self._looked = now
        if found is None:
            return now - self._since >= self._limit * (0.5 if is_stopped(self.rank) else 3)
        number, self._place = json.loads(found)
        self.has_ended = number == _ENDED
        return not self.has_ended and now - self._since >= self._limit

    def error(self) -> RankError:
        """Return the error that describes the silence."""
        silent = self._looked - self._since
        return RankError(
            f"rank {self.rank} has not answered for {silent:.0f} s; it was last at {self._place}{self._told()}. Its"
            " process is stopped, or its machine is gone",
            remedy="the same command again: what was saved is whole",
            rank=self.rank,
        )

    def _told(self) -> str:
        """Return its last position in its schedule that its engine's watch reported, or an empty text."""
        key = last_place(self._store, self.rank)
        return "" if key is None or not self._store.check([key]) else f" ({json.loads(self._store.get(key))['at']})"


def is_stopped(rank: int) -> bool:
    """Return whether this rank's process, started on this machine by the same launcher, is stopped, as far as that can
    be known. A process that has not joined yet gives no sign of life, and may only be slow to start."""
    return _find_stopped(rank) is not None


def end_stopped(rank: int) -> None:
    """Kill that process if it is stopped: it reacts to no other signal, and its launcher would wait for it."""
    process = _find_stopped(rank)
    if process is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _find_stopped(rank: int) -> int | None:
    launcher = os.getppid()
    for process in _words(f"/proc/{launcher}/task/{launcher}/children", b" "):
        folder = f"/proc/{process.decode()}"
        if f"RANK={rank}".encode() in _words(f"{folder}/environ", b"\0"):
            return int(process) if b"State:\tT (stopped)" in _words(f"{folder}/status", b"\n") else None
    return None


def _words(path: str, between: bytes) -> list[bytes]:
    with suppress(OSError):
        return [word for word in Path(path).read_bytes().split(between) if word]
    return []


def key_of(rank: int) -> str:
    return f"shardwise/pulse/{rank}"
