"""The answers of a `generate` that has not ended, from which the same command goes on: OUT.part.

    {"of": "0b5c6fa2d1e3a497", "id": "0", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

A line is written as soon as its request is answered. `of` is a hash of the request, the model and the settings: an
answer to anything else is never taken for this one's. However the process ends, at most the last line is not whole.
"""

import json
import os
from contextlib import suppress
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.output import refuse_link

#: On systems without it, two commands at once are not noticed.
_fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None
_BEGINNING = b'{"of": "'


def hash_of(*told: Any) -> str:
    """Hash values that JSON has."""
    return blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()


class AnswersSoFar:
    """The file beside a target, held by one process at a time. `found` has the bodies of answers by their hashes."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f"{target.name}.part")
        self._target = target
        self.found: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "AnswersSoFar":
        with self._errors():
            refuse_link(self.path)
            self._file: BinaryIO = self.path.open("a+b")
        try:
            self._hold()
            with self._errors():
                self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, story: TracebackType | None
    ) -> None:
        with suppress(OSError):
            if not os.fstat(self._file.fileno()).st_size:
                self.path.unlink()
        with suppress(OSError):  # What could not be written has been said.
            self._file.close()

    def add(self, of: str, answer: dict[str, Any]) -> None:
        """Keep an answer. It is with the system when this returns, so that a kill of the process does not lose it."""
        with self._errors():
            self._file.write(json.dumps({"of": of, **answer}).encode() + b"\n")
            self._file.flush()

    def remove(self) -> None:
        """Remove the file: the target has all answers."""
        with self._errors():
            self.path.unlink()

    def _hold(self) -> None:
        if _fcntl is None:
            return
        try:
            _fcntl.flock(self._file.fileno(), _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        except BlockingIOError:
            raise ShardwiseError(
                f"{self.path} is being written to by another generate", remedy="another --save, or wait for it to end"
            ) from None
        except OSError:  # A file system without locks.
            return

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        if not content[: len(_BEGINNING)] == _BEGINNING[: len(content)]:
            raise self._foreign(1)
        whole = content[: content.rfind(b"\n") + 1]
        for number, row in enumerate(whole.splitlines(), start=1):
            try:
                answer = json.loads(row)
                self.found[answer["of"]] = answer["response"]["body"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise self._foreign(number) from None
        if len(whole) < len(content):  # It ended while it wrote this line.
            self._file.truncate(len(whole))

    def _foreign(self, number: int) -> ShardwiseError:
        return ShardwiseError(
            f"{self.path} would be gone on with, and its line {number} is no answer of an interrupted generate",
            remedy=f"another --save, or rm {self.path}",
        )

    def _errors(self) -> Any:
        return os_errors_as(f"{self.path} cannot be written", remedy="a folder that may be written to")
