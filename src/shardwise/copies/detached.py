"""Processes that outlive the process that started them, and inherit no open files from it."""

import os
from collections.abc import Sequence
from pathlib import Path

from shardwise import environment

#: Above the highest file descriptor of a process.
_MOST_FILES = 65_536


def start_detached(words: Sequence[str], log: Path, *, mode: int = 0o600) -> int:
    """Run a program in a session of its own, with its output appended to `log`, which is created with this mode.

    Return its process id.
    """
    return os.posix_spawn(
        words[0],
        [*words],
        environment.all_variables(),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def let_go_of_files() -> None:
    """Close all inherited files but the standard streams. A detached process does this first.

    Child processes inherit gloo's connections. As long as a child lives, other ranks do not see that its rank is gone,
    and wait 20 s for its heartbeat.
    """
    os.closerange(3, _MOST_FILES)
