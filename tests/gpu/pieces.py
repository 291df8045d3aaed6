"""Parts of the tests on GPUs that run beside each other, each a process of its own with its ranks.

What one does is right or wrong whatever runs beside it, as long as a GPU has queues for all of them (`Room`): nothing
here is timed but how soon a lost rank is named, and that has seconds to spare. What asks the GPU what it does by itself
(a doctor's findings) has it for itself.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tests.gpu.record import ROOT


@dataclass(frozen=True, slots=True)
class Piece:
    """`part` and the options that choose among its cases; `processes` are under way in it at a time."""

    part: str
    processes: int
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.part, *(each for each in self.options if not each.startswith("--"))))

    def values(self, option: str) -> tuple[str, ...]:
        """What follows an option, up to the next."""
        if option not in self.options:
            return ()
        behind = self.options[self.options.index(option) + 1 :]
        return tuple(takewhile(lambda each: not each.startswith("--"), behind))


class Room:
    """How many processes may still begin."""

    def __init__(self, size: int) -> None:
        self._size, self._left, self._changed = size, size, threading.Condition()

    def take(self, waiting: list[Piece]) -> Piece:
        """The first of those that wait for which there is room, when there is."""

        def first() -> Piece | None:
            return next((each for each in waiting if self._needs(each.processes) <= self._left), None)

        with self._changed:
            self._changed.wait_for(lambda: first() is not None)
            found = first()
            assert found is not None, "there is room for one"
            self._left -= self._needs(found.processes)
        waiting.remove(found)
        return found

    def give(self, processes: int) -> None:
        with self._changed:
            self._left += self._needs(processes)
            self._changed.notify_all()

    @contextmanager
    def places(self, processes: int) -> Iterator[None]:
        """Begin when there is room for so many."""
        with self._changed:
            self._changed.wait_for(lambda: self._needs(processes) <= self._left)
            self._left -= self._needs(processes)
        try:
            yield
        finally:
            self.give(processes)

    def _needs(self, processes: int) -> int:
        return min(processes, self._size)  # What needs more than there is runs alone.


def run_at_once(
    pieces: Sequence[Piece], processes: int, record: Path, seconds: float, *, needs: Callable[[Piece], float]
) -> None:
    """Run all of them, as many at a time as there is room for, but none that needs more seconds than are left. What
    they say comes line by line, with their names."""
    deadline, room, waiting = time.monotonic() + seconds, Room(processes), list(pieces)
    threads = []
    while waiting:
        piece = room.take(waiting)
        if time.monotonic() + needs(piece) > deadline:
            room.give(piece.processes)
            continue
        thread = threading.Thread(target=_run, args=(piece, record, deadline, room))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()


def _run(piece: Piece, record: Path, deadline: float, room: Room) -> None:
    left = deadline - time.monotonic()
    command = [sys.executable, "-m", "tests.gpu", "--only", piece.part, *piece.options, "--at-once", "1"]
    command += ["--record", str(record), *(["--seconds", f"{left:.0f}"] if left != float("inf") else [])]
    start = time.monotonic()
    try:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{piece.name} | {line}", end="", flush=True)
        status = process.wait()
        print(f"{piece.name} | status {status} after {time.monotonic() - start:.0f} s", flush=True)
    finally:
        room.give(piece.processes)
