"""OpenAI's batch form: a file with a request a line, and one with an answer a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def ", "max_tokens": 8}}
    {"id": "0", "custom_id": "a", "response": {"status_code": 200, "request_id": "0", "body": {...}}, "error": null}

A body is what the server accepts at that URL: it is checked against the same schemas and answered in the same form. If
a line cannot be answered, its answer says why; the other lines are answered.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.serving.http.answers import AnswerForm, make_form
from shardwise.serving.http.api_error import ApiError, refused
from shardwise.serving.http.asked import Asked, Served, asked_for_chat, asked_for_completion
from shardwise.serving.http.fields import CHAT, COMPLETION
from shardwise.serving.http.json_schema import check
from shardwise.serving.http.written import Written
from shardwise.serving.request import Answering, Request

CHAT_URL = "/v1/chat/completions"
_URLS: dict[str, tuple[dict[str, Any], Callable[..., Asked]]] = {
    "/v1/completions": (COMPLETION, asked_for_completion),
    CHAT_URL: (CHAT, asked_for_chat),
}
#: How often a line is begun whose replica fails.
_MOST_ATTEMPTS = 3
_EXAMPLE = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}'


@dataclass(slots=True, kw_only=True)
class Line:
    """A request of the file, and its answer when there is one. Lines are counted from 1."""

    number: int
    custom_id: str
    url: str
    method: str
    body: Any
    error: ApiError | None = None
    #: The body of its answer.
    answer: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return str(self.number - 1)

    @property
    def is_open(self) -> bool:
        return self.error is None and self.answer is None

    @property
    def num_tokens(self) -> int:
        return 0 if self.answer is None else int(self.answer["usage"]["completion_tokens"])


def read_lines(text: str) -> Iterator[Line]:
    """Yield the requests of a file. A file that is not JSON lines is refused; a body that the server would refuse, if
    that can be told without the model, is the line's error.
    """
    lines = dict[str, int]()
    # Not `splitlines`: JSON may have separators of lines and paragraphs within texts.
    for number, row in enumerate(text.split("\n"), start=1):
        if not row.strip():
            continue
        try:
            given = json.loads(row, parse_constant=_no_constant)
            custom_id = given["custom_id"]
            url, method, body = given.get("url", "/v1/completions"), given.get("method", "POST"), given.get("body")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ShardwiseError(
                f"line {number} is not a JSON request with a custom_id: {row[:60]}", remedy=_EXAMPLE
            ) from None
        if not isinstance(custom_id, (str, int)) or isinstance(custom_id, bool):
            raise ShardwiseError(f"line {number} has a custom_id that is neither a text nor a number", remedy=_EXAMPLE)
        custom_id = str(custom_id)
        if custom_id in lines:
            raise ShardwiseError(
                f"lines {lines[custom_id]} and {number} have the same custom_id {custom_id!r}",
                remedy="a custom_id of its own for each line",
            )  # fmt: skip
        lines[custom_id] = number
        line = Line(number=number, custom_id=custom_id, url=str(url), method=str(method), body=body)
        with _errors_of(line):
            _check(line)
        yield line
    if not lines:
        raise ShardwiseError("the file has no requests", remedy=_EXAMPLE)


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number in JSON")


def answer_all(
    engine: Answering,
    served: Served,
    lines: Iterable[Line],
    *,
    seed: int | None = None,
    answered: Callable[[Line], None] | None = None,
) -> None:
    """Answer every line that has no answer and can be answered, as fast as possible; `answered` is told of each.

    With a seed, requests without one get one that depends on it and on their custom_id alone, so that they are answered
    alike beside whatever others.
    """
    under_way: dict[str, _UnderWay] = {}

    def begin(line: Line, attempt: int) -> None:
        with _errors_of(line):
            begun = _begin(engine, served, line, seed, attempt)
            under_way.update(dict.fromkeys(begun.written, begun))

    for line in lines:
        if line.is_open:
            begin(line, 1)
    while engine.has_work():
        for token in engine.step():
            at = under_way.get(token.request)
            if at is None:
                continue
            if token.finish == "failed":  # Its replica is gone; others may answer it.
                for name in at.written:
                    under_way.pop(name, None)
                    engine.cancel(name)
                if at.attempt < _MOST_ATTEMPTS:
                    begin(at.line, at.attempt + 1)
                else:
                    at.line.error = ApiError(503, token.failure, code="engine_failed")
                continue
            written = at.written[token.request]
            written.add([token])
            if written.finish is None:
                continue
            del under_way[token.request]
            if token.finish is None:  # The text has reached a stop string, which the engine does not know.
                engine.cancel(token.request)
            if at.is_whole:
                at.line.answer = at.form.whole(list(at.written.values()))
                if answered is not None:
                    answered(at.line)


class _UnderWay:
    """A line while it is answered: by the names of its requests, what is written."""

    def __init__(self, line: Line, attempt: int, form: AnswerForm, requests: Iterable[Request]) -> None:
        self.line, self.attempt, self.form = line, attempt, form
        self.written = {each.id: Written(form.served.text, form.asked, each) for each in requests}

    @property
    def is_whole(self) -> bool:
        return all(each.finish is not None for each in self.written.values())


class _errors_of:  # noqa: N801 - reads as a phrase where it is used
    """Makes what is wrong with a request within it the error of its line."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> bool:
        if isinstance(error, RecursionError):
            error = ApiError(400, "the body is nested too deeply", code="invalid_json")
        if not isinstance(error, ApiError):
            return False
        self._line.error = error
        return True


def _check(line: Line) -> None:
    if line.url not in _URLS:
        raise ApiError(400, f"url is {line.url[:80]!r}; known: {', '.join(_URLS)}", param="url")
    if line.method != "POST":
        raise ApiError(400, f"method is {line.method[:20]!r}; known: POST", param="method")
    check(line.body, _URLS[line.url][0])
    if line.body.get("stream"):
        raise ApiError(400, "stream is true, and a file has whole answers", param="stream")


def _begin(engine: Answering, served: Served, line: Line, seed: int | None, attempt: int) -> _UnderWay:
    """Submit all of a line's requests to the engine, or none of them."""
    asked = _URLS[line.url][1](line.body, served, client="")
    if seed is not None and asked.sampling.seed is None:
        drawn = blake2b(f"{seed} {line.custom_id}".encode(errors="surrogatepass"), digest_size=8).digest()
        asked = replace(asked, sampling=replace(asked.sampling, seed=int.from_bytes(drawn) >> 1))
    requests = asked.requests(f"{line.name}-{attempt}", served.grammars)
    begun = _UnderWay(line, attempt, make_form(line.url == CHAT_URL, asked, served), requests)
    try:
        for request in requests:
            engine.add(request)
    except ShardwiseError as error:
        for name in begun.written:
            engine.cancel(name)
        raise refused(error) from None
    return begun


def answer_of(line: Line) -> dict[str, Any]:
    """Return a line of the answers, as JSON has it."""
    if line.error is not None:
        status, body = line.error.status, line.error.body()
    else:
        assert line.answer is not None, "a line was not looked at"
        status, body = 200, line.answer
    response = {"status_code": status, "request_id": line.name, "body": body}
    return {"id": line.name, "custom_id": line.custom_id, "response": response, "error": None}


def write_line(line: Line) -> str:
    """Format a line of the answers."""
    return json.dumps(answer_of(line))
