"""What the HTTP side needs to know of an engine's model: its name, its tokenizer, its chat template."""

from typing import Protocol

from shardwise.serving.http.asked import Served
from shardwise.serving.summary import Summary
from shardwise.serving.text.chat_template import ChatTemplate
from shardwise.serving.text.grammar import Grammars
from shardwise.serving.text.tokenizer import load_tokenizer


class Loaded(Protocol):
    """The part of an engine that tokenizers and templates are made from."""

    max_length: int
    vocabulary_size: int
    tokenizer_source: str
    eos_token_ids: frozenset[int]
    summary: Summary


def served_by(engine: Loaded, name: str | None = None, *, chats: bool = True) -> Served:
    """Return the model of an engine. Without `chats` no chat template is compiled, which needs jinja2."""
    text = load_tokenizer(engine.tokenizer_source)
    return Served(
        name=name or engine.summary.model,
        text=text,
        template=ChatTemplate(text) if chats else None,
        grammars=Grammars(text, size=engine.vocabulary_size, end_tokens=sorted(engine.eos_token_ids)),
        max_length=engine.max_length,
        vocabulary_size=engine.vocabulary_size,
    )
