"""Answers in OpenAI's form, whole and as events of a stream, for both endpoints."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

from shardwise.serving.http.asked import Asked, Served
from shardwise.serving.http.written import Written, WrittenPart, chat_logprobs, completion_logprobs
from shardwise.serving.request import Logprob
from shardwise.serving.text.text_stream import TextStream


def usage_of(asked: Asked, written: Sequence[Written]) -> dict[str, Any]:
    """Return the usage. A prompt counts once, however many answers it has."""
    firsts = written[:: asked.num_choices]
    prompt = sum(len(each) for each in asked.prompts)
    completion = sum(each.num_tokens for each in written)
    cached = sum(each.num_cached for each in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """One answer's id and time, and how its endpoint formats it."""

    kind: ClassVar[str]
    part_kind: ClassVar[str]

    id: str
    created: int
    asked: Asked
    served: Served

    def whole(self, written: Sequence[Written]) -> dict[str, Any]:
        choices = [self.choice(place, each) for place, each in enumerate(written)]
        return {**self._head(self.kind), "choices": choices, "usage": usage_of(self.asked, written)}

    def event(self, place: int, piece: WrittenPart, written: Written, *, is_first: bool) -> dict[str, Any]:
        choice = self.part(place, piece, written, is_first=is_first)
        return {**self._head(self.part_kind), "choices": [choice]}

    def with_usage(self, event: dict[str, Any], written: Sequence[Written]) -> dict[str, Any]:
        """Return the event with the usage so far, if requested; if usage comes last, it is null until then."""
        if self.asked.has_usage_in_events:
            return {**event, "usage": usage_of(self.asked, written)}
        return {**event, "usage": None} if self.asked.has_usage_event else event

    def usage_event(self, written: Sequence[Written]) -> dict[str, Any]:
        return {**self._head(self.part_kind), "choices": [], "usage": usage_of(self.asked, written)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}

    def choice(self, place: int, written: Written) -> dict[str, Any]:
        raise NotImplementedError

    def part(self, place: int, piece: WrittenPart, written: Written, *, is_first: bool) -> dict[str, Any]:
        raise NotImplementedError


class CompletionForm(AnswerForm):
    """`/v1/completions`."""

    __slots__ = ()
    kind = part_kind = "text_completion"

    def choice(self, place: int, written: Written) -> dict[str, Any]:
        return self.part(place, written.whole(), written, is_first=True)

    def part(self, place: int, piece: WrittenPart, written: Written, *, is_first: bool) -> dict[str, Any]:
        prompt = written.request.prompt
        echoed = self.served.text.decode(prompt) if self.asked.echo and is_first else ""
        answer: dict[str, Any] = {
            "index": place, "text": echoed + piece.text, "logprobs": self._logprobs(piece, written, is_first),
            "finish_reason": piece.finish,
        }  # fmt: skip
        if self.asked.return_token_ids:
            answer["token_ids"] = [] if self.asked.is_prompt_alone else list(piece.tokens)
            if is_first:
                answer["prompt_token_ids"] = list(prompt)
        return answer

    def _logprobs(self, piece: WrittenPart, written: Written, is_first: bool) -> dict[str, Any] | None:
        num_top = self.asked.sampling.logprobs
        if num_top is None:
            return None
        text, found = self.served.text, list[tuple[Logprob | None, int, int]]()
        begin = 0
        if self.asked.echo:
            prompt = written.request.prompt
            begin = len(text.decode(prompt))
            if is_first and written.prompt_logprobs is not None:
                offset, stream = 0, TextStream(text)
                for token, each in zip(prompt, [None, *written.prompt_logprobs], strict=False):
                    found.append((each, token, offset))
                    offset += len(stream.add(token))
        found += [(each, each.token, begin + offset) for each, offset in piece.logprobs]
        return completion_logprobs(text, found, num_top)


class ChatForm(AnswerForm):
    """`/v1/chat/completions`."""

    __slots__ = ()
    kind = "chat.completion"
    part_kind = "chat.completion.chunk"

    def choice(self, place: int, written: Written) -> dict[str, Any]:
        piece = written.whole()
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message["tool_calls"] = [_call(call.name, call.arguments) for call in piece.calls]
            message["content"] = piece.text or None
        return self._with_tokens(
            {"index": place, "message": message, "logprobs": self._logprobs(piece), "finish_reason": piece.finish},
            piece, written, is_first=True,
        )  # fmt: skip

    def part(self, place: int, piece: WrittenPart, written: Written, *, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": piece.text} if is_first else {}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            calls = [{"index": at, **_call(call.name, call.arguments)} for at, call in enumerate(piece.calls)]
            delta["tool_calls"] = calls
        return self._with_tokens(
            {"index": place, "delta": delta, "logprobs": self._logprobs(piece), "finish_reason": piece.finish},
            piece, written, is_first=is_first,
        )  # fmt: skip

    def _logprobs(self, piece: WrittenPart) -> dict[str, Any] | None:
        num_top = self.asked.sampling.logprobs
        return None if num_top is None else chat_logprobs(self.served.text, piece.logprobs, num_top)

    def _with_tokens(
        self, choice: dict[str, Any], piece: WrittenPart, written: Written, *, is_first: bool
    ) -> dict[str, Any]:
        if self.asked.return_token_ids:
            choice["token_ids"] = list(piece.tokens)
            if is_first:
                choice["prompt_token_ids"] = list(written.request.prompt)
        return choice


def make_form(is_chat: bool, asked: Asked, served: Served) -> AnswerForm:
    kind = ChatForm if is_chat else CompletionForm
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}"
    return kind(id=name, created=int(time.time()), asked=asked, served=served)


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": arguments}}
