"""The output of one sequence: tokens into text that may be shown, with log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.serving.http.asked import Asked
from shardwise.serving.request import Logprob, Request, Token
from shardwise.serving.text.text_stream import StopStrings, TextStream
from shardwise.serving.text.tokenizer import Text
from shardwise.serving.text.tool_calls import ToolCall, ToolCallStream, marks_of

_LOWEST = -9999.0  # OpenAI's substitute for minus infinity, which JSON does not have.


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """New output: shown text, tokens, their log-probabilities with each token's text offset, and the finish."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[Logprob, int], ...] = ()
    calls: tuple[ToolCall, ...] = ()
    finish: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.calls or self.finish)


@dataclass(slots=True)
class _Total:
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[Logprob, int]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


class Written:
    """One sequence's answer so far. `finish` is set when it is complete."""

    def __init__(self, text: Text, asked: Asked, request: Request) -> None:
        self.request, self._asked = request, asked
        marks = marks_of(text) if asked.tool_names else {}
        self._stream = TextStream(text, request.prompt if asked.continues else (), marks)
        self._stops = StopStrings(asked.stops)
        self._calls = ToolCallStream(asked.tool_names) if asked.tool_names else None
        self._total, self._num_characters = _Total(), 0
        self.finish: str | None = None
        self.num_cached = 0
        self.prompt_logprobs: tuple[Logprob, ...] | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self._asked.is_prompt_alone else len(self._total.tokens)

    def add(self, news: Sequence[Token]) -> WrittenPart:
        """Add tokens and return the new output. Tokens after the end are ignored."""
        shown, tokens, logprobs = "", list[int](), list[tuple[Logprob, int]]()
        calls = list[ToolCall]()
        for token in news:
            if self._is_over():
                break
            self.num_cached = max(self.num_cached, token.num_cached)
            if token.prompt_logprobs is not None:
                self.prompt_logprobs = token.prompt_logprobs
            if token.token is not None and not self._asked.is_prompt_alone:
                offset = self._num_characters
                tokens.append(token.token)
                if not self._is_end(token):
                    shown += self._show(self._stream.add(token.token))
                if token.logprob is not None:
                    logprobs.append((token.logprob, offset))
            self._total.tokens += tokens[-1:] if token.token is not None else []
            self._look_for_end(token)
            if self.finish is not None:
                rest, found = self._end()
                shown += rest
                calls += found
        piece = WrittenPart(
            text=shown, tokens=tuple(tokens), logprobs=tuple(logprobs), calls=tuple(calls), finish=self.finish
        )
        self._total.text.append(shown)
        self._total.logprobs += logprobs
        self._total.calls += calls
        return piece

    def whole(self) -> WrittenPart:
        """Return all of the output."""
        total = self._total
        return WrittenPart(
            text="".join(total.text), tokens=tuple(total.tokens), logprobs=tuple(total.logprobs),
            calls=tuple(total.calls), finish=self.finish,
        )  # fmt: skip

    def _is_over(self) -> bool:
        return self.finish is not None

    def _is_end(self, token: Token) -> bool:
        """Whether the token ends the text; such a token is not part of it."""
        return token.finish == "stop"

    def _show(self, text: str) -> str:
        self._num_characters += len(text)
        may_stop = self.num_tokens >= self.request.sampling.min_tokens
        text = self._stops.add(text, may_stop=may_stop)
        return text if self._calls is None else self._calls.add(text)

    def _look_for_end(self, token: Token) -> None:
        if self._stops.has_stopped:
            self.finish = "stop"
        elif token.finish is not None:
            self.finish = "stop" if token.finish in ("cancelled", "complete") else token.finish

    def _end(self) -> tuple[str, list[ToolCall]]:
        rest = ""
        if not self._stops.has_stopped:
            rest = self._stops.add(self._stream.end())
            rest += self._stops.end()
        if self._calls is None:
            return rest, []
        shown = self._calls.add(rest)
        text, calls = self._calls.end()
        calls = calls[:1] if self._asked.calls_one else calls
        if calls:
            self.finish = "tool_calls"
        return shown + text, calls


def token_text(text: Text, token: int) -> str:
    """Return a single token's characters, or its bytes if they are not whole characters."""
    raw = text.bytes_of(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(text: Text, found: Sequence[tuple[Logprob | None, int, int]], num_top: int) -> dict[str, Any]:
    """Format log-probabilities for `/v1/completions`; None is the first token of a prompt. Each has its text offset."""
    top = [
        None
        if each is None
        else {token_text(text, token): _finite(value) for token, value in reversed(each.top[:num_top])}
        for each, _, _ in found
    ]
    return {
        "tokens": [token_text(text, token) for _, token, _ in found],
        "token_logprobs": [None if each is None else _finite(each.logprob) for each, _, _ in found],
        "top_logprobs": top if num_top else None,
        "text_offset": [offset for _, _, offset in found],
    }


def chat_logprobs(text: Text, found: Sequence[tuple[Logprob, int]], num_top: int) -> dict[str, Any]:
    """Format log-probabilities for `/v1/chat/completions`."""

    def one(token: int, value: float) -> dict[str, Any]:
        return {"token": token_text(text, token), "logprob": _finite(value), "bytes": list(text.bytes_of(token))}

    content = [
        {**one(each.token, each.logprob), "top_logprobs": [one(*pair) for pair in each.top[:num_top]]}
        for each, _ in found
    ]
    return {"content": content, "refusal": None}


def _finite(value: float) -> float:
    return value if value > _LOWEST else _LOWEST
