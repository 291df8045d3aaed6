"""Constrain answers to a JSON schema: the tokens that may come next, by llguidance."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ShardwiseError
from shardwise.serving.text.tokenizer import Text


class Grammars:
    """Makes guides for one tokenizer. `size` is the length of a row of logits, which may exceed the vocabulary."""

    def __init__(self, text: Text, *, size: int, end_tokens: Sequence[int]) -> None:
        self._text, self._size, self._end_tokens = text, size, list(end_tokens)
        self._made: Any = None

    def guide(self, schema: Mapping[str, Any]) -> "SchemaGuide":
        """Make a guide for one sequence. A schema that llguidance does not support is refused with its message."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            raise ShardwiseError(
                "schemas need llguidance, which is not installed", remedy="pip install 'shardwise[serve]'"
            ) from None
        if self._made is None:
            # A byte vocabulary has no end token: one beyond it stands for the end.
            vocabulary = max(self._size, self._text.vocabulary, *(token + 1 for token in self._end_tokens or [0]))
            ends = self._end_tokens or [vocabulary]
            self._made = LLTokenizer(
                self._text.grammar_source(), n_vocab=vocabulary if self._end_tokens else vocabulary + 1, eos_token=ends
            )
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": r"[ ]?"})
            matcher = LLMatcher(self._made, grammar)
        except (ValueError, TypeError) as error:
            raise ShardwiseError(f"the schema is not supported: {_first_line(error)}") from None
        if matcher.is_error():
            raise ShardwiseError(f"the schema is not supported: {_first_line(matcher.get_error())}")
        return SchemaGuide(
            matcher, schema, size=self._size, num_bits=self._made.vocab_size, end_tokens=self._end_tokens
        )


@dataclass(frozen=True, slots=True)
class SentGuide:
    """A guide sent to another process, which makes one of its own from the schema."""

    schema: Mapping[str, Any]


class SchemaGuide:
    """Constrains the tokens of one sequence to a schema. Called in the engine's thread."""

    def __init__(
        self, matcher: Any, schema: Mapping[str, Any], *, size: int, num_bits: int, end_tokens: Sequence[int]
    ) -> None:
        self._matcher, self._schema, self._size = matcher, schema, size
        self._bits = np.zeros(-(-num_bits // 32), dtype=np.int32)
        # If the model has no end token, all tokens are allowed after the end: the reader ends the text.
        ends = [token for token in end_tokens if token < size]
        self._after = np.full(size, not ends)
        self._after[ends] = True
        #: Whether nothing may follow but an end token, if the model has one.
        self.is_complete = False

    def __reduce__(self) -> tuple[object, ...]:
        return SentGuide, (self._schema,)

    def allowed(self) -> NDArray[np.bool_]:
        row = self._after if self.is_complete else self._row()
        return row if row.any() else self._after

    def advance(self, token: int) -> None:
        if not self.is_complete:
            self._matcher.consume_token(token)
            self.is_complete = self._matcher.is_stopped() or (
                self._matcher.is_accepting() and not (self._row() & ~self._after).any()
            )

    def _row(self) -> NDArray[np.bool_]:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        row = np.unpackbits(self._bits.view(np.uint8), bitorder="little").astype(np.bool_)
        return row[: self._size] if len(row) >= self._size else np.pad(row, (0, self._size - len(row)))


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "llguidance does not say why"
