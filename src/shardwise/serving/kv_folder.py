"""The folder of the file tier: one engine has it at a time, and nothing in it is beyond its budget.

kv/lock                  held with flock by the process of the engine, and gone with it, even by kill -9
kv/NAME.kv               blocks of an engine in one process
kv/rank-0/NAME.kv        those of one rank; replica-0/, replica-0/rank-0/: those of a replica
"""

import os
import re
import time
from collections.abc import Container
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.serving.blocks import NAME_BYTES

#: On systems without it, two engines at once are not noticed.
_fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None
SUFFIX = ".kv"
_LOCK = "lock"
_NAME = re.compile(f"[0-9a-f]{{{2 * NAME_BYTES}}}")
#: How long to wait for an engine whose server has just been killed; and for one that is writing its last blocks.
_GONE_SECONDS, _CLOSING_SECONDS = 2.0, 60.0
_LOOK_SECONDS = 0.05
_CLOSING = "closing"


class HeldFolder:
    """A folder that this process holds until `release`, or none."""

    def __init__(self, folder: Path | None = None) -> None:
        self._handle: int | None = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return  # Then nothing can be written there, which turns the tier off with its own words.
        try:
            self._wait(folder, handle)
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        except BaseException as error:
            os.close(handle)
            if isinstance(error, OSError):  # A file system without locks, or one that is full.
                return
            raise
        self._handle = handle

    def tell_closing(self) -> None:
        """Let an engine that comes next wait: the last blocks are being written."""
        if self._handle is not None:
            with suppress(OSError):
                os.ftruncate(self._handle, 0)
                os.pwrite(self._handle, _CLOSING.encode(), 0)

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _wait(self, folder: Path, handle: int) -> None:
        """Take the lock. Refuse if another engine keeps it."""
        begun = time.monotonic()
        while _fcntl is not None:
            try:
                _fcntl.flock(handle, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = os.pread(handle, 64, 0).decode(errors="replace")
            waited = time.monotonic() - begun
            if waited > (_CLOSING_SECONDS if holder == _CLOSING else _GONE_SECONDS):
                who = "still writing to it" if holder == _CLOSING else f"process {holder}"
                raise ShardwiseError(
                    f"--kv-folder {folder} belongs to another server or generate that is running ({who})",
                    remedy="--kv-folder with another, or stop that one",
                )
            time.sleep(_LOOK_SECONDS)


def is_block(path: Path) -> bool:
    return path.suffix == SUFFIX and _NAME.fullmatch(path.stem) is not None


def is_left_over(path: Path) -> bool:
    """Whether it is a block that a killed process had not written to its end."""
    return path.suffix[1:].isdecimal() and _NAME.fullmatch(path.stem) is not None


def clear_others(folder: Path | None, used: Container[Path | None]) -> None:
    """Remove the blocks of engines with another number of ranks or replicas, which one that uses these cannot read."""
    if folder is None:
        return
    with suppress(OSError):
        for each in (folder, *folder.glob("rank-*"), *folder.glob("replica-*"), *folder.glob("replica-*/rank-*")):
            for file in [] if each in used else each.iterdir():
                if is_block(file) or is_left_over(file):
                    file.unlink(missing_ok=True)
