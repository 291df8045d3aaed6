"""What a client does wrong is told in OpenAI's form, with the reason, and the server goes on."""

import gzip
import json
import resource
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from shardwise.serving.http import exchange, metrics, server
from tests.serving.http.repeating import RepeatingEngine
from tests.serving.http.serving_here import Running, running, served_by

PROMPT = {"prompt": "say: x"}
HELLO = {"messages": [{"role": "user", "content": "say: x"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def _tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


#: For each endpoint, a body, and what is said of it.
WRONG: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("completions", {}, "the field 'prompt' is missing", "prompt"),
    ("completions", {"prompt": 3}, "prompt wants a string or a list, not 3", "prompt"),
    ("completions", {"prompt": ""}, "prompt is empty: it must have at least one token", "prompt"),
    ("completions", {"prompt": []}, "prompt has 0 entries; it must have at least 1", "prompt"),
    ("completions", {"prompt": [1, 999]}, "prompt has the token 999; the vocabulary has 258", "prompt"),
    ("completions", {"prompt": [1, -1]}, "prompt[1] is -1; it must be at least 0", "prompt[1]"),
    ("completions", {"prompt": [[]]}, "prompt[0] has 0 entries; it must have at least 1", "prompt[0]"),
    ("completions", {"prompt": ["a"] * 129}, "prompt has 129 entries; it must have at most 128", "prompt"),
    ("completions", {"prompt": [1 << 40]}, "prompt[0] is 1099511627776; it must be at most 2147483648", "prompt[0]"),
    ("completions", {"prompt": ["a", 1]}, "prompt[1] wants a string, not 1", "prompt[1]"),
    ("completions", {"prompt": [255]}, "the token 255 cannot be answered; try: other tokens", None),
    (
        "completions",
        {"prompt": "\ud800"},
        "prompt has half a surrogate pair (\\ud800), which is not a character",
        "prompt",
    ),
    (
        "completions",
        {"prompt": "x" * 3000},
        "the prompt has 3,000 tokens; prompt and answer together have at most 2,048",
        "prompt",
    ),
    (
        "completions",
        {"prompt": "x", "max_tokens": 4000},
        "the prompt has 1 tokens and max_tokens is 4,000; prompt and answer together have at most 2,048",
        "max_tokens",
    ),
    ("completions", {**PROMPT, "max_tokens": -1}, "max_tokens is -1; it must be at least 0", "max_tokens"),
    ("completions", {**PROMPT, "max_tokens": 1.5}, "max_tokens wants a whole number or null, not 1.5", "max_tokens"),
    ("completions", {**PROMPT, "max_tokens": True}, "max_tokens wants a whole number or null, not true", "max_tokens"),
    (
        "completions",
        {**PROMPT, "max_tokens": 0},
        "max_tokens is 0, and with echo left out there is nothing to answer",
        "max_tokens",
    ),
    ("completions", {**PROMPT, "n": 0}, "n is 0; it must be at least 1", "n"),
    ("completions", {"prompt": ["a"] * 100, "n": 2}, "100 prompts with n=2 are 200 answers; at most 128", "n"),
    ("completions", {**PROMPT, "top_p": 0}, "top_p is 0; it must be more than 0", "top_p"),
    ("completions", {**PROMPT, "stop": ""}, "stop has 0 characters; it must have at least 1", "stop"),
    ("completions", {**PROMPT, "stop": ["a"] * 17}, "stop has 17 entries; it must have at most 16", "stop"),
    ("completions", {**PROMPT, "logprobs": 21}, "logprobs is 21; it must be at most 20", "logprobs"),
    (
        "completions",
        {**PROMPT, "logit_bias": {"cat": 1}},
        "logit_bias has 'cat'; its keys are tokens from 0 to 257",
        "logit_bias",
    ),
    (
        "completions",
        {**PROMPT, "logit_bias": {"1": 101}},
        "logit_bias.1 is 101; it must be at most 100",
        "logit_bias.1",
    ),
    (
        "completions",
        {**PROMPT, "stop_token_ids": [999]},
        "stop_token_ids has the token 999; the vocabulary has 258",
        "stop_token_ids",
    ),
    (
        "completions",
        {**PROMPT, "min_tokens": 20},
        "min_tokens is 20, more than the 16 tokens of max_tokens",
        "min_tokens",
    ),
    (
        "completions",
        {**PROMPT, "stream_options": {}},
        "stream_options is given without stream: true",
        "stream_options",
    ),
    (
        "completions",
        {**PROMPT, "best_of": 3, "n": 2},
        "best_of is 3 and n is 2: no answer is chosen from others here; ask for all with n and logprobs, and take the "
        "likeliest",
        "best_of",
    ),
    (
        "completions",
        {**PROMPT, "repetition_penalty": 1e-300},
        "repetition_penalty is 1e-300; it must be at least 0.01",
        "repetition_penalty",
    ),
    (
        "completions",
        {**PROMPT, "suffix": "y"},
        "suffix is 'y': a text is only continued; write the model's tokens for filling in into the prompt",
        "suffix",
    ),
    ("completions", {**PROMPT, "store": True}, "store is true: answers are not stored here; leave it out", "store"),
    (
        "completions",
        {**PROMPT, "length_penalty": 2},
        "length_penalty is 2: there is no beam search; min_tokens and max_tokens set the length",
        "length_penalty",
    ),
    ("completions", {**PROMPT, "messages": []}, "unknown or unsupported field 'messages'", "messages"),
    # Also what cannot be sent back as it came.
    ("completions", {"\ud800": 1}, "unknown or unsupported field '\\ud800'", "\\ud800"),
    (
        "completions",
        {**PROMPT, "logit_bias": {"\ud800": 101}},
        "logit_bias.\\ud800 is 101; it must be at most 100",
        None,
    ),
    ("chat/completions", {"messages": []}, "messages has 0 entries; it must have at least 1", "messages"),
    (
        "chat/completions",
        {"messages": [{"role": "king", "content": "x"}]},
        "messages[0].role is 'king'; known: 'system', 'developer', 'user', 'assistant', 'tool'",
        "messages[0].role",
    ),
    ("chat/completions", {"messages": [{"role": "user"}]}, "the field 'messages[0].content' is missing", None),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
        "messages[0].content[0].type is 'image_url'; known: 'text'",
        None,
    ),
    ("chat/completions", {**HELLO, "top_logprobs": 2}, "top_logprobs is given without logprobs: true", "top_logprobs"),
    (
        "chat/completions",
        {**HELLO, "max_tokens": 2, "max_completion_tokens": 3},
        "max_tokens and max_completion_tokens differ; give one of them",
        "max_tokens",
    ),
    ("chat/completions", {**HELLO, "tool_choice": "auto"}, "tool_choice is given without tools", "tool_choice"),
    (
        "chat/completions",
        {**HELLO, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice names the function 'g', which tools does not have",
        "tool_choice",
    ),
    (
        "chat/completions",
        {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}},
        "the schema is not supported: Invalid type: no",
        "response_format",
    ),
    (
        "chat/completions",
        {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
        "the schema is not supported: no answer follows it, as of one that refers to itself",
        "response_format",
    ),
    (
        "chat/completions",
        {**HELLO, "tools": [_tool({"type": "no"})], "tool_choice": "required"},
        "the schema is not supported: Invalid type: no",
        "tools",
    ),
    (
        "chat/completions",
        {**HELLO, "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs has 'messages', which the template gets from elsewhere",
        "chat_template_kwargs",
    ),
    (
        "chat/completions",
        {**HELLO, "reasoning_effort": "low"},
        "reasoning_effort is 'low': chat_template_kwargs sets what the model's own template knows",
        "reasoning_effort",
    ),
    (
        "chat/completions",
        {**HELLO, "modalities": ["text", "audio"]},
        "modalities is a list of 2: only text is written here; leave it out",
        "modalities",
    ),
    (
        "chat/completions",
        {**HELLO, "response_format": {"type": "yaml"}},
        "response_format.type is 'yaml'; known: 'text', 'json_object', 'json_schema'",
        "response_format.type",
    ),
    (
        "chat/completions",
        {**HELLO, "response_format": {"type": "json_schema"}},
        "the field 'response_format.json_schema' is missing",
        None,
    ),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_field_is_named_with_the_reason(here: Running, case: int) -> None:
    path, body, said, param = WRONG[case]
    with here.client() as client:
        # `json=` refuses what is no UTF-8; escapes are ASCII.
        answer = client.post(f"/v1/{path}", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"] == said
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"prompt": "\xff"}', "the body is not valid UTF-8 at byte 12"),
        (b"{", "the body is not valid JSON: "),
        (b"", "the body is not valid JSON: "),
        (b"[1]", "the body must be a JSON object"),
        (b'{"prompt": NaN}', "the body is not valid JSON: NaN is not a number in JSON"),
        (b"[" * 100_000, "the body is not valid JSON: it is nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "the body is not valid JSON: "),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature is inf; it must be at most 2"),
    ],
)
def test_a_body_that_is_no_json_is_told_why(here: Running, raw: bytes, said: str) -> None:
    with here.client() as client:
        answer = client.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


def test_other_paths_methods_and_types_have_openais_form_too(here: Running) -> None:
    with here.client() as client:
        nowhere, wrong_method = client.get("/v1/nothing"), client.get("/v1/completions")
        form = client.post("/v1/completions", data={"prompt": "x"})
    assert (nowhere.status_code, wrong_method.status_code, form.status_code) == (404, 405, 415)
    for answer in (nowhere, wrong_method, form):
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_nested_as_deeply_as_can_be_read_is_refused_too(here: Running) -> None:
    """What reads JSON goes deeper than what looks at it: no depth between them is an error of the server's."""
    with here.client() as client:
        said = set[str]()
        for depth in (100, 500, *range(900, 1000, 3)):
            deep = '{"a":' * depth + "1" + "}" * depth
            tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
            body = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1, "tools": [{tool}], '
            body += '"tool_choice": "required"}'
            answer = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400 or (answer.status_code, depth) == (200, 100), (depth, answer.text)
            said.add(answer.json().get("error", {}).get("message", "")[:60])
    assert any("nested too deeply" in each for each in said), said


def test_a_packed_body_is_said_to_be(here: Running) -> None:
    with here.client() as client:
        packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        answer = client.post("/v1/completions", content=gzip.compress(b'{"prompt": "x"}'), headers=packed)
    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == "the body is packed (gzip); send it as it is"


def test_a_huge_body_is_refused_before_and_while_it_is_read(here: Running) -> None:
    def pieces() -> Any:
        for _ in range(2 + exchange.MOST_BODY_BYTES // (1 << 20)):
            yield b" " * (1 << 20)

    with here.client() as client:
        told = client.post("/v1/completions", content=b" " * (exchange.MOST_BODY_BYTES + 1))
        assert told.status_code == 413
        untold = client.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
        assert untold.status_code == 413
    assert here.complete(prompt="say: x").json()["choices"][0]["text"] == "x"


def test_who_sends_far_too_much_can_send_it_and_is_told(here: Running) -> None:
    size = 4 * exchange.MOST_BODY_BYTES  # Far more than a connection's buffers hold.
    host, port = here.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as sending:
        sending.sendall(head.encode() + b" " * size)
        assert sending.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_page_of_another_site_is_not_answered(here: Running) -> None:
    hosts = {
        "evil.example": 403,
        "127.0.0.1.evil.example:80": 403,
        "LOCALHOST:8000": 200,
        "127.0.0.2:80": 200,
        "[::1]": 200,
    }
    with here.client() as client:
        for host, status in hosts.items():
            assert client.get("/v1/models", headers={"Host": host}).status_code == status, host


def test_what_is_not_installed_is_said_and_the_rest_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda _: None)
    engine = RepeatingEngine()
    # An engine of somebody's own is theirs to close.
    with running(engine, served=replace(served_by(engine), template=None)) as here, here.client() as client:
        assert here.complete(**PROMPT).status_code == 200
        for answer, said in ((client.get("/metrics"), "prometheus_client"), (here.chat("say: x"), "jinja2")):
            assert answer.status_code == 501
            assert said in answer.json()["error"]["message"]


def test_slow_writers_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEAD_SECONDS", 0.3)
    monkeypatch.setattr(exchange, "BODY_SECONDS", 0.3)
    with running(RepeatingEngine()) as here:
        host, port = here.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as slow:
            silent.settimeout(20)
            slow.settimeout(20)
            silent.sendall(b"POST /v1/comp")
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            assert silent.recv(100) == b""
            assert b" 408 " in slow.recv(4096).splitlines()[0] + b" "


def test_a_second_request_may_not_come_slowly_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEAD_SECONDS", 0.3)
    with running(RepeatingEngine()) as here:
        host, port = here.url.removeprefix("http://").split(":")
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with socket.create_connection((host, int(port))) as slow, socket.create_connection((host, int(port))) as idle:
            for each in (slow, idle):
                each.settimeout(20)
                each.sendall(whole)
                assert take(each).startswith(b"HTTP/1.1 200 ")
            slow.sendall(whole[:20])
            assert slow.recv(100) == b""
            # One that asks for nothing meanwhile is not slow.
            idle.sendall(whole)
            assert take(idle).startswith(b"HTTP/1.1 200 ")


def take(connection: socket.socket) -> bytes:
    """One answer."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += connection.recv(4096)
    head, _, body = got.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(4096)
    return head + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_what_is_no_http_has_openais_form_too(here: Running, raw: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    host, port = here.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as odd:
        odd.settimeout(20)
        odd.sendall(raw + b"\r\n\r\n")
        head, _, body = take(odd).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["message"] == "the request is not valid HTTP/1.1"
    assert capfd.readouterr().err == ""


def test_a_body_that_breaks_off_after_its_answer_is_let_go(here: Running, capfd: pytest.CaptureFixture[str]) -> None:
    """It was answered before it had come; what comes of it then is no HTTP."""
    host, port = here.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as odd:
        odd.settimeout(20)
        odd.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert take(odd).startswith(b"HTTP/1.1 404 ")
        odd.sendall(b"ZZ\r\n")
        assert odd.recv(100) == b""
    assert capfd.readouterr().err == ""


def test_a_reader_that_takes_nothing_holds_nobody_up(here: Running) -> None:
    host, port = here.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"prompt": "letters", "max_tokens": 1500, "temperature": 0, "stream": True, "return_token_ids": True}
    )
    with socket.create_connection((host, int(port))) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert here.complete(prompt="say: others go on", max_tokens=30).json()["choices"][0]["text"] == "others go on"
    deadline = time.monotonic() + 20
    while here.server.loop.tickets() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not here.server.loop.tickets()


@pytest.mark.parametrize("most", [400, pytest.param(10_000, marks=pytest.mark.whole)])
def test_many_connections_are_held_at_once(here: Running, most: int) -> None:
    """As many as this process may open: it has both ends of each."""
    host, port = here.url.removeprefix("http://").split(":")
    count = min(most, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 300) // 2)
    held = [socket.create_connection((host, int(port))) for _ in range(count)]
    try:
        assert here.complete(prompt="say: x").json()["choices"][0]["text"] == "x"
    finally:
        for each in held:
            each.close()
