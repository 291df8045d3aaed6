"""Call external programs: return what they print, or raise a sentence on why they failed."""

import shutil
import subprocess
from collections.abc import Sequence

from shardwise.errors import ShardwiseError

_PATIENCE_SECONDS = 60


def need(program: str, *, problem: str, remedy: str) -> None:
    """Refuse to continue if a program is not installed."""
    if shutil.which(program) is None:
        raise ShardwiseError(f"{problem}: {program} is not found", remedy=remedy)


def ask(words: Sequence[str], *, remedy: str, given: str | None = None) -> str:
    """Return what a program prints. If it fails, the error quotes its message."""
    answer = try_asking(words, given=given)
    if answer.returncode != 0:
        said = (answer.stderr or answer.stdout).strip() or f"status {answer.returncode}"
        raise ShardwiseError(f"{words[0]} refuses: {said.splitlines()[-1]}", remedy=remedy)
    return answer.stdout


def try_asking(words: Sequence[str], *, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its status and output."""
    try:
        return subprocess.run(
            list(words), input=given or "", capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ShardwiseError(
            f"{words[0]} has not answered for {_PATIENCE_SECONDS} s", remedy="the same command later"
        ) from None
    except OSError as error:
        raise ShardwiseError(
            f"{words[0]} cannot be called: {error.strerror}", remedy="--show, which calls nothing"
        ) from None
