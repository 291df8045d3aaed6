"""Text to tokens and tokens to bytes: raw bytes, or a tokenizer of Hugging Face's `tokenizers`.

`load_tokenizer` takes an engine's `tokenizer_source`: "bytes", a folder or `tokenizer.json`, or a GGUF file.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ShardwiseError
from shardwise.serving.text.tokenizer_class import apply_settings
from shardwise.serving.text.tokenizer_settings import read_beside

BYTES = "bytes"
_INSTALL = "pip install 'shardwise[serve]'"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Text(Protocol):
    """The part of a tokenizer that the HTTP side uses."""

    #: Where it came from.
    name: str
    #: One more than the largest token.
    vocabulary: int
    #: The chat template that came with it, as Jinja text; and another for chats with tools, if it has one.
    template: str | None
    tools_template: str | None
    #: The names of tokens that are no text: `decode` leaves them out.
    special: dict[int, str]
    #: Tokens by the names that templates use: `bos_token`, `eos_token`.
    named: dict[str, str]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text. With `special`, also those that the tokenizer puts around every text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens. Invalid UTF-8 becomes U+FFFD."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, independent of its position. For a special token, its name."""

    def grammar_source(self) -> str:
        """Return the tokenizer's description for llguidance. A token beyond the vocabulary stands for the end."""


class ByteText:
    """Every byte is a token; larger tokens have no text."""

    name = BYTES
    vocabulary = 256
    template: str | None = None
    tools_template: str | None = None

    def __init__(self) -> None:
        self.named: dict[str, str] = {}
        self.special: dict[int, str] = {}

    def encode(self, text: str, *, special: bool = True) -> list[int]:  # noqa: ARG002 - there are none
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def grammar_source(self) -> str:
        return "byte"


class LibraryText:
    """A tokenizer of the library `tokenizers`, with its chat template and named tokens."""

    def __init__(
        self, loaded: Any, *, name: str, template: str | None = None, tools_template: str | None = None,
        named: dict[str, str] | None = None,
    ):  # fmt: skip
        self._loaded, self.name, self.template, self.tools_template = loaded, name, template, tools_template
        self.named = named or {}
        # Settings of the training that the file was saved in: a prompt would lose its end, or get tokens that it has
        # not.
        loaded.no_truncation()
        loaded.no_padding()
        # Not the number of tokens: theirs may have gaps.
        self.vocabulary = max(loaded.get_vocab().values(), default=-1) + 1
        decoder = json.loads(loaded.to_str()).get("decoder") or {}
        self._is_byte_level = '"ByteLevel"' in json.dumps(decoder)
        added = loaded.get_added_tokens_decoder()
        self.special = {token: each.content for token, each in added.items() if each.special}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._loaded.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._loaded.decode(list(tokens)))

    def bytes_of(self, token: int) -> bytes:
        piece = self._loaded.id_to_token(token)
        if piece is None:
            return b""
        if token in self.special:
            return str(piece).encode()
        if (found := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(found[1], 16)])
        if self._is_byte_level:
            table = byte_level_table()
            return b"".join(bytes([table[mark]]) if mark in table else mark.encode() for mark in piece)
        return str(piece).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def grammar_source(self) -> str:
        described = json.loads(self._loaded.to_str())
        flags = {"special": True, **dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)}
        # llguidance takes their number for the largest. So gaps are filled, and the token after the last is the end.
        known = set(self._loaded.get_vocab().values())
        gaps = [token for token in range(self.vocabulary + 1) if token not in known]
        described["added_tokens"] += [{"id": token, "content": f"<|no token {token}|>", **flags} for token in gaps]
        return json.dumps(described)


@lru_cache(maxsize=1)
def byte_level_table() -> dict[str, int]:
    """Return the byte of each character in byte-level tokenizers (the inverse of GPT-2's `bytes_to_unicode`)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def load_tokenizer(source: str | Path) -> Text:
    """Load the tokenizer of a model from its engine's source."""
    if str(source) == BYTES:
        return ByteText()
    path = Path(source)
    if path.suffix == ".gguf":
        from shardwise.serving.text.gguf_tokenizer import load_gguf

        loaded, template, named = load_gguf(path)
        return LibraryText(loaded, name=str(path), template=template, named=named)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ShardwiseError(f"there is no tokenizer at {file}", remedy="a folder with a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ShardwiseError(f"{file} is read with tokenizers, which is not installed", remedy=_INSTALL) from None
    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises nothing narrower.
        raise ShardwiseError(
            f"{file} is not a tokenizer: {error}", remedy="a tokenizer.json of Hugging Face's tokenizers"
        ) from None
    beside = read_beside(file.parent)
    beside.add_missing(loaded, file)
    loaded = apply_settings(loaded, beside.config, beside.model_type)
    return LibraryText(
        loaded, name=str(file), template=beside.template, tools_template=beside.tools_template, named=beside.named
    )
