"""What the HTTP side needs to know of an engine's model: its name, its tokenizer, its chat template."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shardwise.errors import ShardwiseError, some
from shardwise.serving.generation_config import GENERATION, NONE, Suggested
from shardwise.serving.http.api_error import ApiError
from shardwise.serving.http.asked import Served
from shardwise.serving.http.fields import COMPLETION
from shardwise.serving.http.json_schema import check
from shardwise.serving.summary import Summary
from shardwise.serving.text.chat_template import ChatTemplate
from shardwise.serving.text.grammar import Grammars
from shardwise.serving.text.tokenizer import BYTES, Text, load_tokenizer


class Loaded(Protocol):
    """The part of an engine that tokenizers and templates are made from."""

    max_length: int
    vocabulary_size: int
    tokenizer_source: str
    eos_token_ids: frozenset[int]
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A model's tokenizer and chat template, which can be read before its weights."""

    text: Text
    #: None if there will be no chats.
    template: ChatTemplate | None
    #: The sampling of requests that say nothing of it.
    sampling: Mapping[str, float] = field(default_factory=dict)


def read_words(tokenizer_source: str, suggested: Suggested = NONE, *, chats: bool = True) -> Words:
    """Read a model's tokenizer; with `chats` its template too, which needs jinja2."""
    text = load_tokenizer(tokenizer_source)
    sampling, left_out = suggested
    for name, value in sampling.items():
        try:
            check(value, COMPLETION["properties"][name], at=name)
        except ApiError as error:
            raise ShardwiseError(f"{GENERATION}: {error.message}", remedy="another value there, or none") from None
    if left_out:
        warnings.warn(f"{GENERATION} has {some(left_out)}, which is not applied here", stacklevel=2)
    return Words(text=text, template=ChatTemplate(text) if chats else None, sampling=sampling)


def served_by(engine: Loaded, name: str | None = None, *, words: Words | None = None) -> Served:
    """Return the model of an engine. `words` are those that have been read already."""
    words = words or read_words(engine.tokenizer_source)
    text = words.text
    if text.name != BYTES and text.vocabulary > engine.vocabulary_size:
        warnings.warn(
            f"the tokenizer ({text.name}) has {text.vocabulary:,} tokens and the model {engine.vocabulary_size:,}:"
            " texts with others are refused", stacklevel=2,
        )  # fmt: skip
    return Served(
        name=name or engine.summary.model,
        text=text,
        template=words.template,
        sampling=words.sampling,
        grammars=Grammars(text, size=engine.vocabulary_size, end_tokens=sorted(engine.eos_token_ids)),
        max_length=engine.max_length,
        vocabulary_size=engine.vocabulary_size,
    )
