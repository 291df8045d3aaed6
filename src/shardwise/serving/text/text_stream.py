"""Text out of tokens that come one after the other: whole characters, and no stop string, not even a part of one.

tokens --> TextStream --> text that is whole --> StopStrings --> text that may be shown
"""

from collections.abc import Sequence

from shardwise.serving.text.tokenizer import Text

#: A character of UTF-8 has at most 4 bytes. What is no character after 4 more tokens never becomes one.
_MOST_TOKENS_OF_A_CHARACTER = 4
_REPLACED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of tokens so far. Each call gives what is new; a character that is not whole yet is kept back.

    A token's text depends on those before it (spaces at the beginning, bytes of one character), so a few of them are
    decoded again with it:

        tokens   ... a b c | d e | f        begin: where decoding begins; shown: up to where text was given out
                     begin   shown
    """

    def __init__(self, text: Text) -> None:
        self._text, self._tokens = text, list[int]()
        self._begin = self._shown = 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        before = self._text.decode(self._tokens[self._begin : self._shown])
        now = self._text.decode(self._tokens[self._begin :])
        is_cut = now.endswith(_REPLACED) and len(self._tokens) - self._shown <= _MOST_TOKENS_OF_A_CHARACTER
        if is_cut or len(now) <= len(before):
            return ""
        self._begin, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def end(self) -> str:
        """What was kept back and will not be completed."""
        before = self._text.decode(self._tokens[self._begin : self._shown])
        now = self._text.decode(self._tokens[self._begin :])
        self._begin = self._shown = len(self._tokens)
        return now[len(before) :]


class StopStrings:
    """Text up to the first of some strings. What may be the beginning of one is kept back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self.has_stopped = False

    def add(self, text: str) -> str:
        """What may be shown now. After a stop string there is nothing more."""
        if self.has_stopped:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.has_stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - kept
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def end(self) -> str:
        """What was kept back, and was no stop string after all."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text begin a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
