"""A file of requests is answered as the server answers them, by the same schemas and in the same forms."""

import json
from typing import Any

import pytest

from shardwise.errors import ShardwiseError
from shardwise.serving.batch_file import answer_all, read_lines, write_line
from shardwise.serving.request import Token
from tests.serving.http.repeating import RepeatingEngine
from tests.serving.http.serving_here import served_by


def _answers(*given: dict[str, Any]) -> list[dict[str, Any]]:
    engine = RepeatingEngine(slots=2)
    rows = [{"custom_id": str(place), "method": "POST", **each} for place, each in enumerate(given)]
    lines = list(read_lines("\n".join(map(json.dumps, rows)) + "\n\n"))
    answer_all(engine, served_by(engine), lines)
    assert engine.load().num_used_blocks == 0
    return [json.loads(write_line(line))["response"] for line in lines]


def test_completions_and_chats_are_answered_and_stop_where_they_were_told() -> None:
    said = {"role": "user", "content": "say: one two three"}
    found = _answers(
        {"url": "/v1/chat/completions", "body": {"messages": [said], "n": 2}},
        {"url": "/v1/chat/completions", "body": {"messages": [said], "stop": " two"}},
        {"url": "/v1/completions", "body": {"prompt": ["say: a", "say: b"], "return_token_ids": True}},
        {"body": {"prompt": "ab", "max_tokens": 3}},
    )
    assert [each["status_code"] for each in found] == [200] * 4
    chats = [[each["message"]["content"].strip() for each in body["body"]["choices"]] for body in found[:2]]
    assert chats == [["one two three"] * 2, ["one"]]
    assert [each["text"].strip() for each in found[2]["body"]["choices"]] == ["a", "b"]
    assert all(each["token_ids"] for each in found[2]["body"]["choices"])
    assert found[3]["body"]["choices"][0]["finish_reason"] == "length"
    assert found[3]["body"]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"url": "/v1/embeddings", "body": {}}, "url is '/v1/embeddings'; known: /v1/completions"),
        ({"body": {"prompt": "a", "temperature": 9}}, "temperature"),
        ({"body": {"prompt": "a", "max_tokns": 9}}, "max_tokns"),
        ({"body": {"prompt": "a", "stream": True}}, "a file has whole answers"),
        ({"body": {"prompt": [[97], [255]]}}, "the token 255 cannot be answered"),
        ({"method": "GET", "body": {"prompt": "a"}}, "method is 'GET'; known: POST"),
        ({"body": "a"}, "object"),
        ({}, "object"),
    ],
)
def test_a_line_that_cannot_be_answered_says_why_and_the_others_are_answered(given: Any, words: str) -> None:
    wrong, right = _answers(given, {"body": {"prompt": "say: yes"}})
    assert wrong["status_code"] == 400
    assert words in wrong["body"]["error"]["message"]
    assert right["body"]["choices"][0]["text"].strip() == "yes"


class _Failing(RepeatingEngine):
    """Two replicas, say, of which one fails as often as told, each time with all that runs."""

    num_failures = 0

    def step(self) -> list[Token]:
        told = super().step()
        if self.num_failures and len(told) > 1:
            self.num_failures -= 1
            return [
                Token(request=each.request, token=None, finish="failed", failure="a replica has failed: killed")
                for each in told
            ]
        return told


@pytest.mark.parametrize(("num_failures", "status"), [(2, 200), (3, 503)])
def test_what_a_replica_has_not_answered_others_answer_and_no_answer_is_half(num_failures: int, status: int) -> None:
    engine = _Failing(slots=2)
    engine.num_failures = num_failures
    body = {"prompt": "say: a long one", "n": 2, "max_tokens": 30}
    (line,) = read_lines(json.dumps({"custom_id": "a", "body": body}))
    answer_all(engine, served_by(engine), [line])
    response = json.loads(write_line(line))["response"]
    assert response["status_code"] == status
    if status == 200:
        assert [each["text"].strip() for each in response["body"]["choices"]] == ["a long one"] * 2
    else:
        assert response["body"]["error"]["message"] == "a replica has failed: killed"
    assert engine.load().num_used_blocks == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"custom_id": 1}\n[1]\n', "line 2 is not a JSON request with a custom_id"),
        ('{"custom_id": "a", "body": ' + "[" * 5000, "line 1 is not a JSON request with a custom_id"),
        ('{"custom_id": 1, "body": {"temperature": NaN}}', "line 1 is not a JSON request with a custom_id"),
        ("\n \n", "the file has no requests"),
        ('{"custom_id": null}', "line 1 has a custom_id that is neither a text nor a number"),
        (
            '{"custom_id": "1"}\n\n{"custom_id": 1}',
            "lines 1 and 3 have the same custom_id '1'",
        ),
    ],
)
def test_a_file_that_is_no_requests_is_refused(text: str, said: str) -> None:
    with pytest.raises(ShardwiseError, match=said):
        list(read_lines(text))


def test_a_text_may_have_separators_of_lines_in_it() -> None:
    """JSON has them unescaped; only a line feed ends a line."""
    rows = [{"custom_id": str(place), "body": {"prompt": f"a{mark}b"}} for place, mark in enumerate("\u2028\u2029\x85")]
    read = list(read_lines("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)))
    assert [line.body["prompt"] for line in read] == ["a\u2028b", "a\u2029b", "a\x85b"]
