"""Files that a command was told to write: whole or not at all, where it was told to, and nowhere else.

A file is written beside its place and moved there. What is no plain file (a folder, a device, a pipe) is refused, and
so is a link: where it leads to is not what was named.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import ShardwiseError

#: What there may be at a place that no file is moved over, as `stat` tells it.
_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISCHR, "it is a device"),
    (stat.S_ISBLK, "it is a device"),
    (stat.S_ISFIFO, "it is a pipe"),
    (stat.S_ISSOCK, "it is a socket"),
)


def check_output(path: Path, *, remedy: str | None = None) -> None:
    """Refuse a place that nothing can be written to, before anything is computed for it.

    `remedy` is what to type if it is no file, or the system refuses it.
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
    """Refuse a place that leads to another one."""
    if path.is_symlink():
        there = path.parent / path.readlink()
        raise ShardwiseError(f"{path} cannot be written: it is a link to {there}", remedy=f"{there} itself")


def save_output(path: Path, text: str, *, remedy: str | None = None) -> None:
    """Write a file that the user has named: all that can go wrong is a sentence."""
    save_outputs({path: text}, remedy=remedy)


def save_outputs(texts: Mapping[Path, str], *, remedy: str | None = None) -> None:
    """Write several. Of them all are there whole, or none at all."""
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
    """Write a text, or leave what was there before. What the system refuses is an `OSError`.

    What is private is so from its first byte on, whatever was there before.
    """
    with replacing(path, is_private=is_private) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """A file to write to. It stands at `path` when the context ends well, and is gone when it does not."""
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
    """That of the file at a place, if there is one. What is no plain file is refused."""
    refuse_link(path)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    except ValueError:
        raise ShardwiseError(f"{str(path)!r} is no name of a file", remedy=remedy) from None
    for is_kind, said in _KINDS:
        if is_kind(mode):
            raise ShardwiseError(f"{path} cannot be written: {said}", remedy=remedy or "the name of a file")
    return mode


def _refused(path: Path, error: OSError, remedy: str | None) -> ShardwiseError:
    """What the system says: a disk that is full or read-only, a folder of somebody else's."""
    return ShardwiseError(
        f"{path} cannot be written: {error.strerror or error}", remedy=remedy or "a folder that may be written to"
    )


def _beside(path: Path) -> Path:
    """No other process's, and not too long where the name itself is not."""
    return path.with_name(f".{path.name[:200]}.{os.getpid()}.part")


def _make(beside: Path, mode: int) -> int:
    """A new file, also where somebody has put a link."""
    beside.unlink(missing_ok=True)
    return os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
