"""Copies of a run in this machine's memory: files in `/dev/shm`, which outlive the processes that wrote them.

    /dev/shm/shardwise-1000/ID/NODE/
        step-00000120.4f1c.4/            a generation: step 120, made by four ranks of the run with the mark 4f1c
            rank-00000.safetensors       the state of rank 0, as in a checkpoint
            rank-00000.json              its boxes and checksums; written last, which makes the piece valid
            rank-00003.safetensors       of a rank on the previous machine, whose neighbour is this one
            rank-00003.json

A generation is a checkpoint whose files are on several machines. It is complete while every rank's piece exists
somewhere. `ID` is drawn when the run begins and stored in its folder, so that copies of another run are never used.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shardwise import environment

#: In the folder of a run: the subfolder for its copies, with the id and the address of each machine's keeper.
COPIES, ID = "copies", "id"
_NAME = re.compile(r"step-(\d{8,})\.([0-9a-f]+)\.(\d+)")
_PIECE = re.compile(r"rank-(\d{5,})\.json")


class Generation(NamedTuple):
    """The copies of one step. `run` is the mark of the ranks that made them, `num_ranks` their number."""

    step: int
    run: str
    num_ranks: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08}.{self.run}.{self.num_ranks}"


def parse_generation(name: str) -> Generation | None:
    found = _NAME.fullmatch(name)
    return None if found is None else Generation(int(found[1]), found[2], int(found[3]))


def rank_name(rank: int) -> str:
    """Return the prefix of the file names of a rank's piece."""
    return f"rank-{rank:05}"


class Memory:
    """Copies of one run on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Make the folder, readable only by its user."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, generation: Generation, file: str) -> Path:
        return self.folder / generation.name / file

    def generations(self) -> list[Generation]:
        """Return the generations, oldest first."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []  # noqa: PTH208 - names are wanted
        return sorted(found for name in names if (found := parse_generation(name)) is not None)

    def pieces(self) -> dict[Generation, list[int]]:
        """Return the ranks whose complete piece is here, by generation."""
        found = {}
        for each in self.generations():
            with suppress(FileNotFoundError):
                names = sorted(path.name for path in (self.folder / each.name).iterdir())
                found[each] = [int(piece[1]) for name in names if (piece := _PIECE.fullmatch(name)) is not None]
        return found

    def keep_only(self, wanted: Iterable[Generation]) -> None:
        """Delete all other generations. Each is renamed first, so that none is ever partly deleted."""
        kept = set(wanted)
        for each in self.generations():
            if each not in kept:
                self.forget_one(each)

    def forget_one(self, generation: Generation) -> None:
        going = self.folder / f"{generation.name}.{secrets.token_hex(4)}.going"
        with suppress(FileNotFoundError):
            (self.folder / generation.name).rename(going)
        shutil.rmtree(going, ignore_errors=True)

    def forget(self) -> None:
        """Free all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # Another node on the same machine, in a test or a container, may still use it.
            self.folder.parent.rmdir()

    def free_bytes(self) -> int:
        """Return the free bytes of the file system."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    @contextmanager
    def alone_with(self, path: Path) -> Iterator[None]:
        """Return a context in which no other process of this machine fetches this file."""
        from fcntl import LOCK_EX, flock  # Not on every system, and not needed without copies.

        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            flock(handle, LOCK_EX)
            yield
        finally:
            os.close(handle)


def memory_of(run_id: str, node: str) -> Memory:
    """Return the memory of a run's copies on a machine."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", node)
    return Memory(environment.memory_root() / f"shardwise-{os.getuid()}" / run_id / plain)


def draw_id(folder: Path) -> str:
    """Return the id of the run in a folder, drawn if it has none. One process of the run calls this first."""
    path = folder / COPIES / ID
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        beside = path.with_name(f"{ID}.{secrets.token_hex(4)}")
        beside.write_text(secrets.token_hex(8), encoding="utf-8")
        with suppress(FileExistsError):
            os.link(beside, path)
        beside.unlink()
    return path.read_text(encoding="utf-8").strip()


def find_id(folder: Path) -> str | None:
    """Return the id, or None if the run never had copies."""
    try:
        return (folder / COPIES / ID).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
