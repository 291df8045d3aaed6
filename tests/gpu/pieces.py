"""Parts of the tests on GPUs that run beside each other, each a process of its own with its ranks.

What one does is right or wrong whatever runs beside it, as long as a GPU has queues for all of them (`Room`): nothing
here is timed but how soon a lost rank is named, and that has seconds to spare. What asks the GPU what it does by itself
(a doctor's findings) has it for itself. All that a piece says is in build/gpu_logs too, a file for each.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tests.gpu.record import ROOT

LOGS = ROOT / "build" / "gpu_logs"
_PATIENCE_SECONDS = 8.0


#: A GPU has queues for so many ranks (16 and more were told by its driver that it is out of memory: H200, 24 of 141 GB
#: in use). A rank asks for 32, a process that is none for 8.
MOST_RANKS = 14
QUEUES, _FEW_QUEUES = 32, 8


@dataclass(frozen=True, slots=True)
class Piece:
    """`part` and the options that choose among its cases. `processes` are under way in it at a time: ranks, or not."""

    part: str
    processes: int
    options: tuple[str, ...] = ()
    label: str = ""
    are_ranks: bool = True

    @property
    def queues(self) -> int:
        return self.processes * (QUEUES if self.are_ranks else _FEW_QUEUES)

    @property
    def name(self) -> str:
        return self.label or " ".join((self.part, *(each for each in self.options if not each.startswith("--"))))

    @property
    def log(self) -> Path:
        return LOGS / f"{re.sub(r'[^A-Za-z0-9_]+', '_', self.name.removesuffix('.py'))}.log"

    def values(self, option: str) -> tuple[str, ...]:
        """What follows an option, up to the next."""
        if option not in self.options:
            return ()
        behind = self.options[self.options.index(option) + 1 :]
        return tuple(takewhile(lambda each: not each.startswith("--"), behind))


class Room:
    """How many processes may still begin, and how many queues of the GPUs are left for them."""

    def __init__(self, size: int, queues: int) -> None:
        self._most = self._left = (size, queues)
        self._changed = threading.Condition()

    def take(self, waiting: list[Piece], seconds: float | None = None) -> Piece | None:
        """The first of those that wait for which there is room, when there is; None if there is none for so long."""

        def first() -> Piece | None:
            return next((each for each in waiting if self._fits(each)), None)

        with self._changed:
            self._changed.wait_for(lambda: first() is not None, seconds)
            found = first()
            if found is None:
                return None
            self._add(found, -1)
        waiting.remove(found)
        return found

    def give(self, piece: Piece) -> None:
        with self._changed:
            self._add(piece, 1)
            self._changed.notify_all()

    def _fits(self, piece: Piece) -> bool:
        return all(need <= left for need, left in zip(self._needs(piece), self._left, strict=True))

    def _add(self, piece: Piece, sign: int) -> None:
        processes, queues = self._needs(piece)
        self._left = (self._left[0] + sign * processes, self._left[1] + sign * queues)

    def _needs(self, piece: Piece) -> tuple[int, int]:
        """What needs more than there is runs alone."""
        return min(piece.processes, self._most[0]), min(piece.queues, self._most[1])


def run_at_once(
    pieces: Sequence[Piece], room: Room, record: Path, seconds: float, *, needs: Callable[[Piece], float]
) -> None:
    """Run all of them, as many at a time as there is room for, but none that needs more seconds than are left. What
    they say comes line by line, with their names. What is not over when the time is up is ended."""
    deadline, waiting = time.monotonic() + seconds, list(pieces)
    threads: list[threading.Thread] = []
    started: list[subprocess.Popen[str]] = []

    def patience() -> float | None:
        """What has left its group may hold a piece's output open for ever: nobody waits for that."""
        return None if seconds == float("inf") else max(0.0, deadline - time.monotonic()) + _PATIENCE_SECONDS

    try:
        while waiting and (piece := room.take(waiting, patience())) is not None:
            if time.monotonic() + needs(piece) > deadline:
                room.give(piece)
                continue
            thread = threading.Thread(target=_run, args=(piece, record, deadline, room, started), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join(patience())
    except BaseException:
        for process in list(started):
            threading.Thread(target=_end, args=(process,)).start()
        raise


def _run(piece: Piece, record: Path, deadline: float, room: Room, started: "list[subprocess.Popen[str]]") -> None:
    left = deadline - time.monotonic()
    command = [sys.executable, "-m", "tests.gpu", "--only", piece.part, *piece.options, "--at-once", "1"]
    command += ["--record", str(record), *(["--seconds", f"{left:.0f}"] if left != float("inf") else [])]
    start = time.monotonic()
    try:
        # A group of its own: so all that it has started is ended with it.
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        timer = threading.Timer(min(left, threading.TIMEOUT_MAX), _end, [process])
        timer.daemon = True
        timer.start()
        assert process.stdout is not None
        LOGS.mkdir(parents=True, exist_ok=True)
        with process.stdout as said, piece.log.open("a", encoding="utf-8") as log:
            for line in said:
                print(f"{piece.name} | {line.rstrip(chr(10))}", flush=True)
                log.write(line)
                log.flush()
        status = process.wait()
        timer.cancel()
        ended = ", ended before it was over" if status == -signal.SIGTERM else ""
        print(f"{piece.name} | status {status} after {time.monotonic() - start:.0f} s{ended}", flush=True)
    finally:
        room.give(piece)


def _end(process: "subprocess.Popen[str]") -> None:
    """End a piece and all that it has started. Ranks end with the process that has started them."""
    for number, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 0.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        time.sleep(seconds)
