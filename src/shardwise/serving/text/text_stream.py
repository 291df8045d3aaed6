"""Text from a stream of tokens: only whole characters, and no stop string, not even a part of one.

tokens --> TextStream --> whole characters --> StopStrings --> text that may be shown
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from shardwise.serving.text.tokenizer import Text

#: A UTF-8 character has at most 4 bytes. What is not a character after 4 more tokens never becomes one.
_MOST_TOKENS_OF_A_CHARACTER = 4
#: A token's text depends on fewer tokens before it.
_MOST_TOKENS_BEFORE = 5
_REPLACED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of the tokens so far. Each call returns what is new; an incomplete character is held back.

    A token's text depends on those before it (leading spaces, bytes of one character), so a few of them are decoded
    again with it:

        tokens   ... a b c | d e | f        begin: where decoding begins; shown: up to where text was returned
                     begin   shown

    With `after`, they continue the text of those tokens, so that the space with which they may begin is kept. `marks`
    are tokens that are shown by their names although they are no text.
    """

    def __init__(self, text: Text, after: Sequence[int] = (), marks: Mapping[int, str] = MappingProxyType({})) -> None:
        before = _last_whole(text, after)
        self._text, self._tokens, self._marks = text, before, marks
        self._begin, self._shown = 0, len(before)

    def add(self, token: int) -> str:
        if token in self._marks:
            return self.end() + self._marks[token]
        self._tokens.append(token)
        before = self._text.decode(self._tokens[self._begin : self._shown])
        now = self._text.decode(self._tokens[self._begin :])
        is_cut = now.endswith(_REPLACED) and len(self._tokens) - self._shown <= _MOST_TOKENS_OF_A_CHARACTER
        if is_cut or len(now) <= len(before):
            return ""
        self._begin, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def end(self) -> str:
        """Return what was held back and will not be completed."""
        before = self._text.decode(self._tokens[self._begin : self._shown])
        now = self._text.decode(self._tokens[self._begin :])
        self._begin = self._shown = len(self._tokens)
        return now[len(before) :]


def _last_whole(text: Text, tokens: Sequence[int]) -> list[int]:
    """The last few tokens, from the beginning of a character on: of bytes that begin within one, none may become a
    character. None of them, if they end within one."""
    sizes = range(_MOST_TOKENS_BEFORE, _MOST_TOKENS_BEFORE + _MOST_TOKENS_OF_A_CHARACTER)
    parts = (list(tokens[-size:]) for size in sizes)
    return next((part for part in parts if not text.decode(part).endswith(_REPLACED)), [])


class StopStrings:
    """Text up to the first stop string. A possible beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self.has_stopped = False

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Return what may be shown now. After a stop string there is nothing more; one that ends where the text may not
        stop is text.
        """
        if self.has_stopped:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found and may_stop:
            self.has_stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - kept
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def end(self) -> str:
        """Return what was held back and is not a stop string after all."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return how many of the last characters of a text begin a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
