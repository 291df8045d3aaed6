"""Token files: a sequence of tokens, the ends of documents, and a checksum of every block. They are memory-mapped.

The format is safetensors, for which there are many readers: `tokens` (uint8, uint16 or uint32), `ends` (int64: where
each document ends, in tokens), `checksums` (uint32: CRC-32 of each block of `tokens`), and the rest as metadata.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.output import replacing

FORMAT = "shardwise tokens 1"
BLOCK_BYTES = 1 << 20
# The header is written last, when the sizes are known, into space that was reserved for it.
_HEADER_BYTES = 4096
_AGAIN = "shardwise data INPUT --save FILE makes it again"
_TYPES: dict[str, type[np.unsignedinteger[Any]]] = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32}
_WORDS = {np.dtype(kind).str: word for word, kind in _TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """An open token file. `digest` covers all of its contents."""

    path: Path
    tokens: NDArray[np.unsignedinteger[Any]]
    ends: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    vocabulary: int
    tokenizer: str
    digest: str
    #: Where the tokens begin in the file.
    offset: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes

    @property
    def num_documents(self) -> int:
        return len(self.ends)

    def verify(self) -> None:
        """Read all tokens, and compare them with the checksums, the digest and the vocabulary."""
        if _digest_of(self.tokens.dtype.str, self.ends, self.checksums) != self.digest:
            at = self.offset + self.tokens.nbytes
            raise ShardwiseError(
                f"{self.path} is damaged after byte {at}, where it says where documents end: that is not as it was"
                " written",
                remedy=_AGAIN,
            )
        size = BLOCK_BYTES // self.tokens.itemsize
        for block, checksum in enumerate(self.checksums):
            part = self.tokens[block * size : (block + 1) * size]
            at = self.offset + block * BLOCK_BYTES
            if zlib.crc32(part.tobytes()) != checksum:
                raise ShardwiseError(
                    f"{self.path} is damaged between the bytes {at} and {at + part.nbytes}: they are not as they were"
                    " written",
                    remedy=_AGAIN,
                )
            beyond = np.flatnonzero(part >= self.vocabulary)
            if len(beyond):
                raise self.beyond(block * size + int(beyond[0]))

    def beyond(self, place: int) -> ShardwiseError:
        """Return the error for a token beyond the vocabulary."""
        return ShardwiseError(
            f"{self.path} has the token {self.tokens[place]} at byte {self.offset + place * self.tokens.itemsize}, and"
            f" its vocabulary has {self.vocabulary}",
            remedy=f"{_AGAIN}, with the tokenizer that it is for",
        )


class TokenWriter:
    """Writes a token file document by document to a temporary file, and renames it when it is complete."""

    def __init__(self, path: Path, *, vocabulary: int, tokenizer: str) -> None:
        self._path, self._vocabulary, self._tokenizer = path, vocabulary, tokenizer
        self._word = "U8" if vocabulary <= 1 << 8 else "U16" if vocabulary <= 1 << 16 else "U32"
        self._ends: list[int] = []
        self._checksums: list[int] = []
        self._rest = b""
        self.num_tokens = 0
        self._file: BinaryIO | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "TokenWriter":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._stack.enter_context(replacing(self._path))
        self._file.write(b" " * _HEADER_BYTES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, story: TracebackType | None
    ) -> None:
        assert self._file is not None, "a writer is used in a with statement"
        if error is not None:
            self._stack.__exit__(kind, error, story)
            return
        with self._stack:
            self._end(self._file)

    def add(self, document: Iterable[int] | bytes) -> None:
        """Add a document. An empty one is left out."""
        assert self._file is not None, "a writer is used in a with statement"
        kind = _TYPES[self._word]
        if isinstance(document, bytes) and self._word == "U8":
            data = document
        else:
            data = np.fromiter(document, dtype=np.int64).astype(kind).tobytes()
        if not data:
            return
        self.num_tokens += len(data) // np.dtype(kind).itemsize
        self._ends.append(self.num_tokens)
        self._rest += data
        while len(self._rest) >= BLOCK_BYTES:
            self._block(self._file, self._rest[:BLOCK_BYTES])
            self._rest = self._rest[BLOCK_BYTES:]

    def _block(self, file: BinaryIO, data: bytes) -> None:
        file.write(data)
        self._checksums.append(zlib.crc32(data))

    def _end(self, file: BinaryIO) -> None:
        if self._rest:
            self._block(file, self._rest)
        num_bytes = self.num_tokens * np.dtype(_TYPES[self._word]).itemsize
        padding = -num_bytes % 8
        ends, checksums = np.array(self._ends, "<i8"), np.array(self._checksums, "<u4")
        file.write(b"\0" * padding + ends.tobytes() + checksums.tobytes())
        digest = _digest_of(np.dtype(_TYPES[self._word]).str, ends, checksums)
        first = num_bytes + padding
        second = first + ends.nbytes
        header = {
            "__metadata__": {
                "format": FORMAT,
                "vocabulary": str(self._vocabulary),
                "tokenizer": self._tokenizer,
                "digest": digest,
            },
            "tokens": _outline(self._word, self.num_tokens, 0, num_bytes),
            # Unused: safetensors requires every byte to belong to a tensor.
            "padding": _outline("U8", padding, num_bytes, first),
            "ends": _outline("I64", len(ends), first, second),
            "checksums": _outline("U32", len(checksums), second, second + checksums.nbytes),
        }
        text = json.dumps(header).encode()
        assert len(text) <= _HEADER_BYTES - 8, f"a header of {len(text)} bytes"
        file.seek(0)
        file.write(struct.pack("<Q", _HEADER_BYTES - 8) + text.ljust(_HEADER_BYTES - 8))
        file.flush()
        os.fsync(file.fileno())


def _outline(word: str, length: int, start: int, stop: int) -> dict[str, object]:
    return {"dtype": word, "shape": [length], "data_offsets": [start, stop]}


def _digest_of(kind: str, ends: NDArray[np.int64], checksums: NDArray[np.uint32]) -> str:
    """Return the digest of a file's contents. The checksums stand for the tokens."""
    digest = blake2b(digest_size=16)
    for each in (_WORDS[kind].encode(), ends.tobytes(), checksums.tobytes()):
        digest.update(each)
    return digest.hexdigest()


def open_tokens(path: Path) -> Tokens:
    """Map a token file. Its header and its length are checked here; `verify` reads the rest."""
    header, size = _read_header(path)
    try:
        metadata = header["__metadata__"]
        vocabulary, word = int(metadata["vocabulary"]), header["tokens"]["dtype"]
        spans = {name: tuple(map(int, header[name]["data_offsets"])) for name in ("tokens", "ends", "checksums")}
        kinds = {"tokens": np.dtype(_TYPES[word]), "ends": np.dtype("<i8"), "checksums": np.dtype("<u4")}
        needed = _HEADER_BYTES + max(stop for _, stop in spans.values())
        tokenizer, digest = str(metadata["tokenizer"]), str(metadata["digest"])
    except (KeyError, TypeError, ValueError) as error:
        raise ShardwiseError(
            f"{path} is damaged in its header, which are its first {_HEADER_BYTES} bytes: {error}",
            remedy=_AGAIN,
        ) from None
    if size != needed:
        raise ShardwiseError(
            f"{path} has {size} bytes, and by its header it would have {needed}: it was cut short or added to at byte"
            f" {min(size, needed)}",
            remedy=_AGAIN,
        )

    def part(name: str) -> NDArray[Any]:
        (start, stop), dtype = spans[name], kinds[name]
        if stop == start:
            return np.empty(0, dtype)
        return np.memmap(path, dtype, "r", _HEADER_BYTES + start, ((stop - start) // dtype.itemsize,))

    if spans["tokens"][0] == spans["tokens"][1]:
        raise ShardwiseError(
            f"{path} has no token in it", remedy="shardwise data INPUT --save FILE, of a file with text"
        )
    return Tokens(
        path=path,
        tokens=part("tokens"),
        ends=part("ends"),
        checksums=part("checksums"),
        vocabulary=vocabulary,
        tokenizer=tokenizer,
        digest=digest,
        offset=_HEADER_BYTES + spans["tokens"][0],
    )


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    remedy = "shardwise data INPUT --save FILE makes a token file"
    with os_errors_as(f"the token file {path} cannot be read", remedy=remedy), path.open("rb") as file:
        size, start = path.stat().st_size, file.read(_HEADER_BYTES)
    if not start:
        raise ShardwiseError(f"{path} is empty, at byte 0", remedy=remedy)
    try:
        (length,) = struct.unpack("<Q", start[:8])
        header = json.loads(start[8 : 8 + length]) if length == _HEADER_BYTES - 8 else {}
        found = header.get("__metadata__", {}).get("format")
    except (struct.error, ValueError, AttributeError):
        found = None
    if found != FORMAT:
        raise ShardwiseError(f"{path} is not a token file: its header, from byte 0 on, does not say so", remedy=remedy)
    return header, size
