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
            self._made = self._make(LLTokenizer)
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": r"[ ]?"})
            matcher = LLMatcher(self._made, grammar)
        except (ValueError, TypeError) as error:
            raise ShardwiseError(f"the schema is not supported: {_first_line(error)}") from None
        if matcher.is_error():
            raise ShardwiseError(f"the schema is not supported: {_first_line(matcher.get_error())}")
        made = SchemaGuide(
            matcher, schema, size=self._size, num_bits=self._made.vocab_size, end_tokens=self._end_tokens,
            known_ends=self._known_ends(), its_end=self._made.eos_token,
        )  # fmt: skip
        if not made.can_begin:
            raise ShardwiseError("the schema is not supported: no answer follows it, as of one that refers to itself")
        return made

    def _make(self, kind: Any) -> Any:
        """Describe the tokenizer to llguidance. It needs an end token that it knows: the model's, or a stand-in."""
        beyond = max(self._size, self._text.vocabulary + 1)
        ends = self._known_ends() or [self._text.vocabulary]
        try:
            return kind(self._text.grammar_source(), n_vocab=beyond, eos_token=ends)
        except Exception as error:  # Whatever is not supported of a tokenizer.
            raise ShardwiseError(
                f"the model's tokenizer cannot follow a schema: {_first_line(error)}",
                remedy="leave response_format out, and describe the form in a message",
            ) from None

    def _known_ends(self) -> list[int]:
        return [token for token in self._end_tokens if token < self._text.vocabulary]


@dataclass(frozen=True, slots=True)
class SentGuide:
    """A guide sent to another process, which makes one of its own from the schema."""

    schema: Mapping[str, Any]


class SchemaGuide:
    """Constrains the tokens of one sequence to a schema. Called in the engine's thread."""

    def __init__(
        self, matcher: Any, schema: Mapping[str, Any], *, size: int, num_bits: int, end_tokens: Sequence[int],
        known_ends: Sequence[int], its_end: int,
    ) -> None:  # fmt: skip
        self._matcher, self._schema, self._size = matcher, schema, size
        self._bits = np.zeros(-(-num_bits // 32), dtype=np.int32)
        # If the model has no end token, all tokens are allowed after the end: the reader ends the text.
        ends = [token for token in end_tokens if token < size]
        self._after = np.full(size, not ends)
        self._after[ends] = True
        # End tokens that llguidance does not know. If it knows none, its own stands in, and is no token of the model's.
        self._stand_in = its_end if its_end not in known_ends else None
        self._unknown_ends = ends if self._stand_in is not None else [end for end in ends if end not in known_ends]
        #: Whether nothing may follow but an end token, if the model has one.
        self.is_complete = False

    def __reduce__(self) -> tuple[object, ...]:
        return SentGuide, (self._schema,)

    @property
    def can_begin(self) -> bool:
        return bool(self._row().any())

    def allowed(self) -> NDArray[np.bool_]:
        row = self._after if self.is_complete else self._row()
        return row if row.any() else self._after

    def advance(self, token: int) -> None:
        if token in self._unknown_ends:
            self.is_complete = True
        if not self.is_complete:
            self._matcher.consume_token(token)
            self.is_complete = self._matcher.is_stopped() or (
                self._matcher.is_accepting() and not (self._row() & ~self._after).any()
            )

    def _row(self) -> NDArray[np.bool_]:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        row = np.unpackbits(self._bits.view(np.uint8), bitorder="little").astype(np.bool_)
        row = row[: self._size] if len(row) >= self._size else np.pad(row, (0, self._size - len(row)))
        if self._stand_in is not None:
            row[self._stand_in : self._stand_in + 1] = False
        if self._unknown_ends:
            row[self._unknown_ends] = self._matcher.is_accepting()
        return row


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "llguidance does not say why"
