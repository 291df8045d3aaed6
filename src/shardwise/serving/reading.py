"""What `serve` reads of a model beside its weights: tokenizer, chat template, suggested sampling."""

import argparse
import warnings
from importlib.util import find_spec
from typing import NamedTuple

from shardwise.errors import ShardwiseError
from shardwise.serving.generation_config import GENERATION, Suggested
from shardwise.serving.served import Words, read_words


class Found(NamedTuple):
    """Which model it is, and all that is needed of it for its texts."""

    model: str
    fingerprint: str
    tokenizer_source: str
    suggested: Suggested


def look_at_model(arguments: argparse.Namespace) -> Found:
    """Find the model. Called in the engine's process, which has torch."""
    from shardwise.serving.identify import find_newest_run, identify

    if arguments.model is None:
        arguments.model = str(find_newest_run())
    identity = identify(arguments.model, random_weights=arguments.random_weights)
    return Found(arguments.model, identity.fingerprint, identity.tokenizer_source, identity.suggested)


class Reading:
    """Reads tokenizer and template while the weights are read, so that a mistake in them is told at once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments, self._fingerprint = arguments, ""
        self.words: Words | None = None

    def look(self, found: Found) -> None:
        """Take what `look_at_model` has found, before the first start of the engine and before every other."""
        if self.words is None:
            # An engine that is started again has the same model, even if there is a newer run by then.
            self._arguments.model, self._fingerprint = found.model, found.fingerprint
            self.words = _words_of(found)
        elif found.fingerprint != self._fingerprint:
            self._check_same(found, self.words)
            self._fingerprint = found.fingerprint
            warnings.warn(
                f"the files of {found.model} have changed: from now on the new weights are served", stacklevel=2
            )

    def _check_same(self, found: Found, before: Words) -> None:
        """Refuse a model whose texts have other tokens by now: prompts are written with the words of the first."""
        if _said(_words_of(found)) != _said(before):
            raise ShardwiseError(
                f"the tokenizer, the chat template or {GENERATION} of {found.model} has changed",
                remedy="start the server again",
            )


def _words_of(found: Found) -> Words:
    return read_words(found.tokenizer_source, found.suggested, chats=find_spec("jinja2") is not None)


def _said(words: Words) -> tuple[object, ...]:
    text = words.text
    return text.grammar_source(), text.template, text.tools_template, text.named, dict(words.sampling)
