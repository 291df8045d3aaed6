"""Output files of commands: written completely or not at all, and only at the path that the user gives.

A file is written to a temporary file beside its path, and renamed. A path that is not a regular file (a folder, a
device, a pipe) is refused. So is a link, as its target is not the path that was given.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import ShardwiseError

#: Kinds of paths that are never replaced, by the tests of `stat`.
_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISCHR, "it is a device"),
    (stat.S_ISBLK, "it is a device"),
    (stat.S_ISFIFO, "it is a pipe"),
    (stat.S_ISSOCK, "it is a socket"),
)


def check_output(path: Path, *, remedy: str | None = None) -> None:
    """Refuse a path that cannot be written, before anything is computed for it.

    `remedy` is for a path that is not a file, or that the system refuses.
    """
    try:
        _find_mode(path, remedy)
        if not path.parent.is_dir():
            raise ShardwiseError(
                f"{path} cannot be written: there is no folder {path.parent}", remedy=f"mkdir -p {path.parent}"
            )
        beside = _beside(path)
        os.close(_make(beside, 0o666))
        beside.unlink()
    except OSError as error:
        raise _refused(path, error, remedy) from None


def refuse_link(path: Path) -> None:
    """Refuse a symbolic link."""
    if path.is_symlink():
        there = path.parent / path.readlink()
        raise ShardwiseError(f"{path} cannot be written: it is a link to {there}", remedy=f"{there} itself")


def save_output(path: Path, text: str, *, remedy: str | None = None) -> None:
    """Write a file that the user has named. Every failure is a `ShardwiseError`."""
    save_outputs({path: text}, remedy=remedy)


def save_outputs(texts: Mapping[Path, str], *, remedy: str | None = None) -> None:
    """Write several files, all of them completely or none at all."""
    for path in texts:
        check_output(path, remedy=remedy)
    with ExitStack() as stack:
        for path, text in texts.items():
            try:
                file = stack.enter_context(replacing(path))
                file.write(text.encode())
                file.flush()
            except OSError as error:
                raise _refused(path, error, remedy) from None


def write_whole(path: Path, text: str, *, is_private: bool = False) -> None:
    """Write a text atomically: on failure the previous file stays. Raise an `OSError` if the system refuses.

    A private file is so from its first byte on, whatever the mode of the previous file.
    """
    with replacing(path, is_private=is_private) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write to. It replaces `path` if the context succeeds, and is deleted if it fails."""
    mode, beside = _find_mode(path), _beside(path)
    handle = _make(beside, 0o600 if is_private else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None and not is_private:
                os.fchmod(handle, stat.S_IMODE(mode))
            yield file
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _find_mode(path: Path, remedy: str | None = None) -> int | None:
    """Return the mode of the file at a path, or None. Refuse a path that is not a regular file."""
    refuse_link(path)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    except ValueError:
        raise ShardwiseError(f"{str(path)!r} is not a file name", remedy=remedy) from None
    for is_kind, said in _KINDS:
        if is_kind(mode):
            raise ShardwiseError(f"{path} cannot be written: {said}", remedy=remedy or "the name of a file")
    return mode


def _refused(path: Path, error: OSError, remedy: str | None) -> ShardwiseError:
    """Return the error for a refusal of the system: a full or read-only disk, a folder of another user."""
    return ShardwiseError(
        f"{path} cannot be written: {error.strerror or error}", remedy=remedy or "a folder that may be written to"
    )


def _beside(path: Path) -> Path:
    """Return the temporary path: unique to this process, and not too long if the name itself is not."""
    return path.with_name(f".{path.name[:200]}.{os.getpid()}.part")


def _make(beside: Path, mode: int) -> int:
    """Create a new file, even if there is a link at its path."""
    beside.unlink(missing_ok=True)
    return os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
