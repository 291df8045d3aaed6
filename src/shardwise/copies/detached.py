"""Processes that go on when whoever started them is gone, and hold nothing of theirs."""

import os
from collections.abc import Sequence
from pathlib import Path

from shardwise import environment

#: More files than a process has open.
_MOST_FILES = 65_536


def start_detached(words: Sequence[str], log: Path, *, mode: int = 0o600) -> int:
    """Run a program in a session of its own; what it says goes behind what is in `log`, which is made with this mode.

    Returns the number of its process.
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
    """Close what this process has from whoever started it, but for standard streams: the first thing that it does.

    gloo leaves its connections open to processes that are started. As long as one of these lives, other ranks do not
    see that the rank is gone, and wait 20 s for its sign of life.
    """
    os.closerange(3, _MOST_FILES)
