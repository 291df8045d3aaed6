"""`shardwise generate`: a file of requests answered, and gone on with after it was interrupted."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.serving.batch_part import AnswersSoFar
from shardwise.serving.engine import LLMEngine
from shardwise.serving.request import Request
from tests.nets.families import save_theirs
from tests.serving.answers import expected, prompts


def test_a_file_of_requests_is_answered_line_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = save_theirs("llama", tmp_path / "model")
    given = prompts(3)
    bodies = [
        {"prompt": list(given[0]), "max_tokens": 5, "temperature": 0, "return_token_ids": True},
        {"prompt": "ABC", "max_tokens": 4, "temperature": 0.8, "seed": 3},
        {"prompt": list(given[1]), "max_tokens": 500},
        {"prompt": [1], "max_tokns": 5},
        {"prompt": {"a": 1}},
    ]
    lines = [{"custom_id": f"c{number}", "url": "/v1/completions", "body": each} for number, each in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["generate", str(tmp_path / "model"), "--requests", str(tmp_path / "in.jsonl")]
    with pytest.warns(UserWarning, match=r"2 of 5 requests cannot be answered; the first, line 4: .*max_tokns"):
        assert main([*words, "--save", str(tmp_path / "out.jsonl"), "--kv", "1MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_refused"] == 3
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [each["custom_id"] for each in answers] == ["c0", "c1", "c2", "c3", "c4"]
    assert [each["response"]["status_code"] for each in answers] == [200, 200, 400, 400, 400]
    first = answers[0]["response"]["body"]
    assert first["choices"][0]["token_ids"] == expected(theirs, given[0], 5)
    assert first["usage"] == {
        "prompt_tokens": len(given[0]), "completion_tokens": 5, "total_tokens": len(given[0]) + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    messages = [each["response"]["body"]["error"]["message"] for each in answers[2:]]
    assert "together have at most 64" in messages[0]
    assert "max_tokns" in messages[1]
    assert "prompt" in messages[2]


def test_a_file_that_is_no_text_or_would_be_replaced_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'{"custom_id": "\xff"}')
    words = ["generate", "model", "--requests", str(file)]
    assert main([*words, "--save", str(tmp_path / "out.jsonl")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {file} is not text in UTF-8: byte 15 is 0xff\n")
    assert main([*words, "--save", str(file)]) == 1
    assert capsys.readouterr().err == f"error: --save {file} would replace the requests\n  try: --save out.jsonl\n"


def test_a_prompt_is_continued_on_the_terminal_and_a_refusal_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_theirs("llama", tmp_path / "model")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["generate", str(tmp_path / "model"), "--kv", "1MiB", "--save", str(tmp_path / "out.jsonl")]
    assert main([*words, "--prompt", "ABC"]) == 0
    text = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["response"]["body"]["choices"][0]["text"]
    assert capsys.readouterr().out.endswith(f"\n\nABC{text}\n")
    assert main([*words, "--prompt", ""]) == 1
    assert capsys.readouterr().out.endswith(
        "the first refused, prompt: prompt is empty: it must have at least one token\n"
    )


def _write(file: Path, bodies: Iterable[Any]) -> list[str]:
    rows = [{"custom_id": f"c{place}", "body": body} for place, body in enumerate(bodies)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return ["generate", str(file.parent / "model"), "--requests", str(file), "--kv", "1MiB"]


def _read(file: Path) -> list[Any]:
    """Answers without what differs from run to run."""
    answers = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [(each["custom_id"], each["id"], each["response"]["body"]["choices"]) for each in answers]


def test_after_a_kill_the_same_command_goes_on_and_answers_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_theirs("llama", tmp_path / "model")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bodies = [{"prompt": [1 + place % 60, 2], "max_tokens": 5 + place % 50} for place in range(120)]
    words = [*_write(tmp_path / "in.jsonl", bodies), "--seed", "3", "--json"]
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardwise", *words, "--save", str(out)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as running:
        while running.poll() is None and (not part.exists() or part.read_bytes().count(b"\n") < 20):
            time.sleep(0.01)
        running.kill()
    assert not out.exists()
    num_kept = part.read_bytes().count(b"\n")
    assert 20 <= num_kept < 120
    with part.open("ab") as file:
        file.write(part.read_bytes().splitlines()[0][:100])  # Killed while it wrote.
    asked, plain = list[str](), LLMEngine.add

    def add(engine: LLMEngine, request: Request) -> None:
        asked.append(request.id)
        plain(engine, request)

    monkeypatch.setattr(LLMEngine, "add", add)
    assert main([*words, "--save", str(out)]) == 0
    assert len(asked) == len(set(asked)) == 120 - num_kept
    told = json.loads(capsys.readouterr().out)
    assert (told["num_requests"], told["num_kept"], told["num_refused"]) == (120, num_kept, 0)
    assert not part.exists()
    assert main([*words, "--save", str(tmp_path / "at-once.jsonl")]) == 0
    assert _read(out) == _read(tmp_path / "at-once.jsonl")


def _interrupted(words: list[str], out: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Run until eight steps are done."""
    plain, steps = LLMEngine.step, count()

    def step(engine: LLMEngine) -> Any:
        if next(steps) == 8:
            raise KeyboardInterrupt
        return plain(engine)

    with monkeypatch.context() as during:
        during.setattr(LLMEngine, "step", step)
        with pytest.warns(UserWarning, match=said):
            assert main([*words, "--save", str(out)]) == 130
    assert not out.exists()


def test_answers_of_an_interrupted_run_are_only_used_for_what_they_are_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    save_theirs("llama", tmp_path / "model")
    out, bodies = tmp_path / "out.jsonl", [{"prompt": [5, 6], "max_tokens": most} for most in (2, 3, 40)]
    words = _write(tmp_path / "in.jsonl", bodies)
    _interrupted(
        words, out, monkeypatch, r"2 of 3 requests are answered, in .*out\.jsonl\.part; the same command goes on"
    )
    kept = (tmp_path / "out.jsonl.part").read_bytes()
    # Another seed, precision or model: nothing is computed, and nothing is lost.
    for more in (["--seed", "1"], ["--precision", "bf16"]):
        capsys.readouterr()
        assert main([*words, *more, "--save", str(out)]) == 1
        assert capsys.readouterr().err.startswith(
            f"error: {out}.part has 2 answers of an interrupted run, and none to these requests with this model,"
        )
        assert (tmp_path / "out.jsonl.part").read_bytes() == kept
    # A request that has changed is answered again. The order of the requests does not matter.
    bodies[1] = {"prompt": [7], "max_tokens": 3}
    _write(tmp_path / "in.jsonl", bodies)
    rows = (tmp_path / "in.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "in.jsonl").write_text("\n".join(reversed(rows)), encoding="utf-8")
    with pytest.warns(UserWarning, match=r"1 answer in .*\.part are to requests that have changed, and are not used"):
        assert main([*words, "--save", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_kept"] == 1
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [each["custom_id"] for each in answers] == ["c2", "c1", "c0"]
    assert [each["id"] for each in answers] == ["0", "1", "2"]
    used = [each["response"]["body"]["usage"] for each in answers]
    assert [(each["prompt_tokens"], each["completion_tokens"]) for each in used] == [(2, 40), (1, 3), (2, 2)]


def test_what_is_left_to_do_decides_whether_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a disk was full at the very end, say, or where no request can be answered."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    save_theirs("llama", tmp_path / "model")
    out = tmp_path / "out.jsonl"
    words = [*_write(tmp_path / "in.jsonl", [{"prompt": [5]}, {"prompt": [5], "n": 2}]), "--save", str(out)]

    def full(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("shardwise.serving.generate_command.save_output", full)
        assert main(words) == 130
    monkeypatch.setattr("shardwise.serving.sources.load_model", None)  # What reads weights.
    assert main(words) == 0
    assert "2 requests answered, 2 of them before; " in capsys.readouterr().out
    assert [len(each[2]) for each in _read(out)] == [1, 2]
    words = [*_write(tmp_path / "in.jsonl", [{"promt": 5}, {"prompt": [5], "n": 0}]), "--save", str(out)]
    with pytest.warns(UserWarning, match="2 of 2 requests cannot be answered; the first, line 1: "):
        assert main(words) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"my notes\n", "its line 1 is no answer of an interrupted generate"),
        (b'{"of": "1", "response": {"body": {}}}\n[]\n', "its line 2 is no answer of an interrupted generate"),
    ],
)
def test_a_file_of_that_name_that_is_something_else_is_left_alone(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    save_theirs("llama", tmp_path / "model")
    (tmp_path / "out.jsonl.part").write_bytes(content)
    words = [*_write(tmp_path / "in.jsonl", [{"prompt": [5]}]), "--save", str(tmp_path / "out.jsonl")]
    assert main(words) == 1
    assert said in capsys.readouterr().err
    assert (tmp_path / "out.jsonl.part").read_bytes() == content


def test_two_at_once_do_not_write_to_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_theirs("llama", tmp_path / "model")
    words = [*_write(tmp_path / "in.jsonl", [{"prompt": [5]}]), "--save", str(tmp_path / "out.jsonl")]
    with AnswersSoFar(tmp_path / "out.jsonl"):
        assert main(words) == 1
    assert "out.jsonl.part is being written to by another generate" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl.part").exists()


_TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "u"}}'


@pytest.mark.parametrize(
    ("command", "files", "body", "said"),
    [
        ("generate", {"tokenizer.json": "{"}, {"prompt": [5]}, "tokenizer.json is not a tokenizer: "),
        ("generate", {"tokenizer_config.json": "["}, {"prompt": [5]}, "tokenizer_config.json is not valid JSON: "),
        (
            "generate",
            {"chat_template.jinja": "{% for %}"},
            {"messages": [{"role": "user", "content": "a"}]},
            "cannot be read: ",
        ),
        ("serve", {"chat_template.jinja": "{% for %}"}, {}, "cannot be read: "),
    ],
)
def test_a_tokenizer_or_template_that_cannot_be_used_is_refused_before_weights_are_read(
    command: str, files: dict[str, str], body: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_theirs("llama", tmp_path / "model")
    for name, text in {"tokenizer.json": _TOKENIZER, **files}.items():
        (tmp_path / "model" / name).write_text(text, encoding="utf-8")
    (tmp_path / "model" / "model.safetensors").unlink()  # Whoever reads weights notices this.
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    row = {"custom_id": "a", "url": url, "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(row), encoding="utf-8")
    words = ["--requests", str(tmp_path / "in.jsonl"), "--save", str(tmp_path / "out.jsonl")]
    assert main([command, str(tmp_path / "model"), *(words if command == "generate" else ["--port", "0"])]) == 1
    assert said in capsys.readouterr().err
