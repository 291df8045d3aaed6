"""OpenAI's batch form: a file with a request a line, and one with an answer a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def ", "max_tokens": 8}}
    {"id": "0", "custom_id": "a", "response": {"status_code": 200, "request_id": "0", "body": {...}}, "error": null}

A prompt is text or token ids. A line that cannot be answered has its reason in its answer; the others are answered.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from shardwise.errors import ShardwiseError, unknown
from shardwise.serving.engine import LLMEngine
from shardwise.serving.request import Finish, Request, Sampling, Token

URL = "/v1/completions"
_OURS = {field.name for field in fields(Sampling)} - {"guide", "prompt_logprobs"}
_KNOWN = (*sorted(_OURS), "model", "prompt", "priority", "cache_salt")


class Tokenizer(Protocol):
    """What is needed of one: `training/data/tokenizer.py` has them."""

    def encode(self, document: bytes) -> Iterable[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


@dataclass(slots=True, kw_only=True)
class Line:
    """A request of the file, and its answer as far as it has come."""

    name: str
    custom_id: str
    request: Request | None = None
    error: ShardwiseError | None = None
    tokens: list[int]
    finish: Finish | None = None


def read_lines(text: str, tokenizer: Tokenizer) -> Iterator[Line]:
    """The requests of a file. What is wrong with one is kept beside it; a file that is no JSON lines is refused."""
    for number, row in enumerate(text.splitlines(), start=1):
        if not row.strip():
            continue
        try:
            given = json.loads(row)
            custom_id = str(given["custom_id"])
        except (ValueError, KeyError, TypeError):
            raise ShardwiseError(
                f"line {number} is no request in JSON with a custom_id: {row[:60]}",
                remedy='{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}',
            ) from None
        line = Line(name=str(number - 1), custom_id=custom_id, tokens=[])
        try:
            if given.get("url", URL) != URL:
                raise unknown("url", str(given["url"]), [URL])
            line.request = read_body(line.name, given.get("body", {}), tokenizer)
        except ShardwiseError as error:
            line.error = error
        yield line


def read_body(name: str, body: Mapping[str, Any], tokenizer: Tokenizer) -> Request:
    """A request from its body."""
    for key in body:
        if key not in _KNOWN:
            raise unknown("field", key, _KNOWN)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        tokens = tuple(tokenizer.encode(prompt.encode()))
    elif isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        tokens = tuple(prompt)
    else:
        raise ShardwiseError(f"prompt is {json.dumps(prompt)[:60]}", remedy='a text or token ids: "prompt": "def "')
    manner = {key: value for key, value in body.items() if key in _OURS}
    manner.setdefault("max_tokens", 16)
    if "logit_bias" in manner:
        manner["logit_bias"] = {int(token): float(bias) for token, bias in manner["logit_bias"].items()}
    if "stop_token_ids" in manner:
        manner["stop_token_ids"] = frozenset(manner["stop_token_ids"])
    return Request(
        id=name,
        prompt=tokens,
        sampling=Sampling(**manner),
        priority=int(body.get("priority", 0)),
        salt=str(body.get("cache_salt", "")),
    )


def answer_all(engine: LLMEngine, lines: Iterable[Line]) -> None:
    """Answer every line that can be answered, as fast as it goes."""
    by_name = {}
    for line in lines:
        if line.request is None:
            continue
        try:
            engine.add(line.request)
        except ShardwiseError as error:
            line.error = error
        else:
            by_name[line.name] = line
    while engine.has_work():
        for token in engine.step():
            take(by_name[token.request], token)


def take(line: Line, token: Token) -> None:
    if token.token is not None:
        line.tokens.append(token.token)
    line.finish = token.finish


def write_line(line: Line, model: str, tokenizer: Tokenizer) -> str:
    """A line of the answers."""
    if line.error is not None or line.request is None:
        message = str(line.error)
        body: dict[str, Any] = {
            "error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        }
        status = 400
    else:
        num_prompt, num_new = len(line.request.prompt), len(line.tokens)
        # The token that ends a text is no part of it.
        told = line.tokens[:-1] if line.finish == "stop" else line.tokens
        status, body = 200, {
            "id": f"cmpl-{line.name}",
            "object": "text_completion",
            "model": model,
            "choices": [
                {"index": 0, "text": tokenizer.decode(told), "token_ids": line.tokens, "finish_reason": line.finish}
            ],
            "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
        }  # fmt: skip
    response = {"status_code": status, "request_id": line.name, "body": body}
    return json.dumps({"id": line.name, "custom_id": line.custom_id, "response": response, "error": None})
