"""Text to tokens: bytes as they are, or a `tokenizer.json` of Hugging Face."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError

BYTES = "bytes"


class ByteTokenizer:
    """Every byte is a token. `name` is for `get_tokenizer`; `vocabulary` is the largest token plus one."""

    name = BYTES
    vocabulary = 256

    def encode(self, document: bytes) -> bytes:
        return document

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, or a folder that has one."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise ShardwiseError(
                f"{path} is read with tokenizers, which is not installed", remedy="pip install 'shardwise[tokenizers]'"
            ) from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ShardwiseError(f"there is no tokenizer at {file}", remedy=f"a tokenizer.json, or {BYTES}")
        try:
            self._loaded: Any = Loaded.from_file(str(file))
        except Exception as error:  # The library raises nothing narrower.
            raise ShardwiseError(
                f"{file} is not a tokenizer: {error}", remedy=f"a tokenizer.json, or {BYTES}"
            ) from None
        self.name, self.vocabulary = str(file), int(self._loaded.get_vocab_size())

    def encode(self, document: bytes) -> Sequence[int]:
        try:
            text = document.decode()
        except UnicodeDecodeError as error:
            raise ShardwiseError(
                f"a document that begins with {document[:20]!r} is not valid UTF-8 at byte {error.start}",
                remedy=f"text in UTF-8, or the tokenizer {BYTES}",
            ) from None
        ids: Sequence[int] = self._loaded.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._loaded.decode(list(tokens)))


Tokenizer = ByteTokenizer | FileTokenizer


def get_tokenizer(word: str) -> Tokenizer:
    """Return the tokenizer of this name, or in this file or folder."""
    return ByteTokenizer() if word == BYTES else FileTokenizer(Path(word))
