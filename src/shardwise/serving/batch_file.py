"""OpenAI's batch form: a file with a request a line, and one with an answer a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def ", "max_tokens": 8}}
    {"id": "0", "custom_id": "a", "response": {"status_code": 200, "request_id": "0", "body": {...}}, "error": null}

A body is what the server accepts at that URL: it is checked against the same schemas and answered in the same form. If
a line cannot be answered, its answer says why; the other lines are answered.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.serving.http.answers import AnswerForm, make_form
from shardwise.serving.http.api_error import ApiError, refused
from shardwise.serving.http.asked import Asked, Served, asked_for_chat, asked_for_completion
from shardwise.serving.http.fields import CHAT, COMPLETION
from shardwise.serving.http.json_schema import check
from shardwise.serving.http.written import Written
from shardwise.serving.request import Answering

CHAT_URL = "/v1/chat/completions"
_URLS: dict[str, tuple[dict[str, Any], Callable[..., Asked]]] = {
    "/v1/completions": (COMPLETION, asked_for_completion),
    CHAT_URL: (CHAT, asked_for_chat),
}
_EXAMPLE = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}'


@dataclass(slots=True, kw_only=True)
class Line:
    """A request of the file, and its answer so far."""

    name: str
    custom_id: str
    url: str
    method: str
    body: Any
    form: AnswerForm | None = None
    error: ApiError | None = None
    written: list[Written] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        """Whether all of it has been written, or it was refused."""
        return self.error is not None or (bool(self.written) and all(each.finish for each in self.written))

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.written)


def read_lines(text: str) -> Iterator[Line]:
    """Yield the requests of a file. A file that is not JSON lines is refused."""
    lines = dict[str, int]()
    # Not `splitlines`: JSON may have separators of lines and paragraphs within texts.
    for number, row in enumerate(text.split("\n"), start=1):
        if not row.strip():
            continue
        try:
            given = json.loads(row)
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
        yield Line(name=str(number - 1), custom_id=custom_id, url=str(url), method=str(method), body=body)


def answer_all(engine: Answering, served: Served, lines: Iterable[Line]) -> None:
    """Answer every line that can be answered, as fast as possible."""
    under_way: dict[str, Written] = {}
    for line in lines:
        try:
            under_way |= _begin(engine, served, line)
        except ApiError as error:
            line.error = error
        except RecursionError:
            line.error = ApiError(400, "the body is nested too deeply", code="invalid_json")
    while engine.has_work():
        for token in engine.step():
            written = under_way.get(token.request)
            if written is None:
                continue
            written.add([token])
            if written.finish is not None:
                del under_way[token.request]
                if token.finish is None:  # The text has reached a stop string, which the engine does not know.
                    engine.cancel(token.request)


def _begin(engine: Answering, served: Served, line: Line) -> dict[str, Written]:
    """Submit all of a line's requests to the engine, or none of them."""
    if line.url not in _URLS:
        raise ApiError(400, f"url is {line.url[:80]!r}; known: {', '.join(_URLS)}", param="url")
    if line.method != "POST":
        raise ApiError(400, f"method is {line.method[:20]!r}; known: POST", param="method")
    schema, make = _URLS[line.url]
    check(line.body, schema)
    asked = make(line.body, served, client="")
    if asked.is_streamed:
        raise ApiError(400, "stream is true, and a file has whole answers", param="stream")
    form = make_form(line.url == CHAT_URL, asked, served)
    requests = asked.requests(line.name, served.grammars)
    try:
        for request in requests:
            engine.add(request)
    except ShardwiseError as error:
        for request in requests:
            engine.cancel(request.id)
        raise refused(error) from None
    line.form, line.written = form, [Written(served.text, asked, request) for request in requests]
    return {each.request.id: each for each in line.written}


def write_line(line: Line) -> str:
    """Format a line of the answers."""
    if line.error is not None or line.form is None:
        assert line.error is not None, "a line was not looked at"
        status, body = line.error.status, line.error.body()
    else:
        status, body = 200, line.form.whole(line.written)
    response = {"status_code": status, "request_id": line.name, "body": body}
    return json.dumps({"id": line.name, "custom_id": line.custom_id, "response": response, "error": None})
