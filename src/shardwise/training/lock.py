"""At most one run in a folder: a lock that its owner holds until the process ends, however it ends.

The owner is one process of a run: the one that starts the ranks, or under `torchrun` the first rank. It writes its
identity to the file `lock`, and holds its `flock`, which the system releases when the process ends, even by kill -9.

Not all shared file systems carry `flock` between machines. So the new owner reads the previous one from the file. If
that was on another machine and did not remove the file, the new owner watches the file for a few seconds. Each owner
increments a counter in it: if the counter changes, the previous owner is alive. No two clocks are ever compared.
"""

import errno
import json
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.errors import ShardwiseError, os_errors_as

#: On systems without it, only the counter protects the folder.
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None

LOCK = "lock"
#: How often an owner increments the counter, and how long an owner on another machine is watched.
_BEAT_SECONDS, _WATCHED_SECONDS = 2.0, 7.0
#: Errors of file systems without locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """A context in which no other run writes to the folder. It raises on entry if another run does already."""

    def __init__(
        self, folder: Path, *, beat_seconds: float = _BEAT_SECONDS, watched_seconds: float = _WATCHED_SECONDS
    ) -> None:
        self._folder, self._path = folder, folder / LOCK
        self._beat, self._watched = beat_seconds, watched_seconds
        self._handle, self._is_locked = -1, False
        self._owner = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, name="shardwise-lock", daemon=True)

    def __enter__(self) -> "RunLock":
        with os_errors_as(f"the lock {self._path} cannot be written", remedy="another --folder"):
            self._handle = self._open()
            before = self._read()
            if before is not None and self._lives(before):
                os.close(self._handle)
                raise self._taken(before)
            self._write(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, story: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        # Unlink first, then unlock: a process that opened the file before the unlink sees that it has no name any more.
        with suppress(OSError):
            if self._has_name(self._handle):
                self._path.unlink()
        os.close(self._handle)

    def _open(self) -> int:
        """Open and lock the file. Retry if an owner that ended meanwhile has unlinked it."""
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                self._lock(handle)
                if self._has_name(handle):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _has_name(self, handle: int) -> bool:
        """Return whether the open file is still the one at the path."""
        try:
            named, opened = self._path.lstat(), os.fstat(handle)
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)

    def _lock(self, handle: int) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._is_locked = True
        except BlockingIOError:
            raise self._taken(self._read() or {}) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise

    def _lives(self, before: dict[str, Any]) -> bool:
        """Return whether the previous owner, which did not remove the file, is alive although the lock was free."""
        if self._is_locked and before.get("host") == self._owner["host"]:
            return False  # On one machine `flock` is reliable.
        deadline = time.monotonic() + self._watched
        while time.monotonic() < deadline:
            time.sleep(self._beat / 4)
            now = self._read()
            if now is None:
                return False
            if now != before:
                return True
        return False

    def _taken(self, owner: dict[str, Any]) -> ShardwiseError:
        said = "another process"
        if owner:
            said = f"process {owner.get('process')} on {owner.get('host')} since {owner.get('since')}"
        return ShardwiseError(
            f"the run in {self._folder} is being trained by {said}",
            remedy="another --folder; or this one, when that run has ended",
        )

    def _count(self) -> None:
        number = 0
        while not self._ended.wait(self._beat):
            number += 1
            with suppress(OSError):  # A full disk ends no run.
                self._write(number)

    def _write(self, number: int) -> None:
        text = json.dumps({**self._owner, "count": number}).encode()
        os.pwrite(self._handle, text.ljust(256), 0)

    def _read(self) -> dict[str, Any] | None:
        """Return the owner that the file names, or None. The file is reopened, to see writes of other machines."""
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None
