"""`shardwise serve`, `bench` and `chat`, over a real engine, as a user types them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from shardwise.cli import main
from shardwise.serving.client.server_process import server_for
from tests.nets.families import save_theirs
from tests.serving.answers import expected, prompts
from tests.serving.http.repeating import RepeatingEngine
from tests.serving.http.serving_here import Running, running


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Any, "subprocess.Popen[str]"]]:
    """What it says when it is ready, the model as transformers has it, and the process."""
    folder = tmp_path_factory.mktemp("model")
    theirs = save_theirs("llama", folder)
    words = [sys.executable, "-m", "shardwise", "serve", str(folder), "--port", "0", "--json", "--kv", "1MiB"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    serving = subprocess.Popen([*words, "--name", "mine"], stdout=subprocess.PIPE, text=True, env=environment)
    assert serving.stdout is not None
    yield json.loads(serving.stdout.readline()), theirs, serving
    serving.kill()
    serving.wait()
    serving.stdout.close()


def test_greedy_tokens_over_http_are_transformers_own(served: Any) -> None:
    ready, theirs, _ = served
    assert ready["num_blocks"] * ready["block_bytes"] == ready["kv_bytes"] <= 1 << 20
    prompt = prompts(1)[0]
    url = f"{ready['url']}/v1"
    with openai.OpenAI(base_url=url, api_key="none", http_client=httpx2.Client(trust_env=False)) as client:
        right = expected(theirs, prompt)
        answer = client.completions.create(
            model="mine", prompt=list(prompt), temperature=0, max_tokens=len(right),
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        assert answer.choices[0].model_extra is not None
        assert tuple(answer.choices[0].model_extra["token_ids"]) == tuple(right)
        with pytest.raises(openai.BadRequestError, match="prompt and answer together have at most 64"):
            client.completions.create(model="mine", prompt=[1] * 100)


def test_it_is_measured_with_a_page_of_curves(served: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    words = [
        "bench",
        served[0]["url"],
        "--workload",
        "tiny",
        "--requests",
        "4",
        "--rate",
        "50,100",
        "--save",
        str(page),
    ]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    assert [each["rate"] for each in found] == [50, 100]
    for each in found:
        assert each["num_requests"] == 4
        assert each["output_tokens"] > 0
        assert each["first_token_seconds"]["p50"] <= each["first_token_seconds"]["p99"] <= each["seconds"]
    assert page.read_text(encoding="utf-8").count("<svg") == 3


def test_requests_that_are_too_long_for_the_model_say_what_to_measure_instead(
    served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", served[0]["url"], "--requests", "2"]) == 1
    said = capsys.readouterr().err
    assert "the server has refused all 2 requests: 400: " in said
    assert "  try: --workload tiny, or a model of longer texts: a prompt and its answer have up to 1," in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--record", "{folder}/file"], "error: --record {folder}/file is no folder to write to: File exists\n"),
        (
            ["--host", "192.0.2.1", "--api-key", "k"],
            "error: 192.0.2.1:0 cannot be listened on: Cannot assign requested address\n"
            "  try: --host 127.0.0.1, or an address of this machine\n",
        ),
    ],
)
def test_what_it_cannot_write_to_or_listen_on_is_refused_before_weights_are_read(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = [each.format(folder=tmp_path) for each in words]
    assert main(["serve", str(tmp_path / "no-model"), "--port", "0", *words]) == 1
    assert capsys.readouterr().err.startswith(said.format(folder=tmp_path))


def test_a_tier_that_is_off_is_one_line(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "model")
    (tmp_path / "file").touch()
    words = [sys.executable, "-m", "shardwise", "serve", str(tmp_path / "model"), "--port", "0", "--json"]
    words += ["--kv", "1MiB", "--kv-files", "1MiB", "--kv-folder", str(tmp_path / "file")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as serving:
        assert serving.stdout is not None
        assert "url" in json.loads(serving.stdout.readline())
        serving.send_signal(signal.SIGINT)
        assert serving.communicate()[1] == f"warning: the file tier in {tmp_path / 'file'} is off: File exists\n"


def test_one_talks_with_it_in_the_terminal(
    here: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("say: hello\nsay: again\n\n"))
    assert main(["chat", here.url]) == 0
    assert capsys.readouterr().out == "hello\nagain\n2 answers\n"


def test_a_conversation_goes_on_where_the_model_has_no_room_for_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run of `shardwise train` has 128 tokens for prompt and answer; this model has 64. Answers take what is left.
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with server_for(str(tmp_path / "config.json"), ["--random-weights", "--kv", "1MiB"]) as address:
        monkeypatch.setattr("sys.stdin", StringIO("hello\nagain\n\n"))
        assert main(["chat", address.url, "--json"]) == 0
        told = capsys.readouterr()
        assert [each["role"] for each in json.loads(told.out)["messages"]] == ["user", "assistant"] * 2
        assert told.err.count("the conversation is too long for the model") == 1
        monkeypatch.setattr("sys.stdin", StringIO("hello\n\n"))
        assert main(["chat", address.url, "--max-tokens", "64"]) == 1
        assert "prompt and answer together have at most 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chat --max-tokens 0", "error: --max-tokens 0: it must be at least 1\n"),
        ("chat --temperature 3", "error: --temperature 3: it must be from 0 to 2\n"),
        ("bench --vocabulary 0 --show", "error: --vocabulary 0: it must be at least 1\n"),
        ("bench http://127.0.0.1:99999", "error: http://127.0.0.1:99999 is no address: Port out of range 0-65535\n"),
        ("chat http://[::1", "error: http://[::1 is no address: Invalid IPv6 URL\n"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_a_model_is_read(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 1
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("command", ["bench", "chat"])
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"SSH-2.0-x\r\n", "it is not HTTP, or broke off (IncompleteReadError)"),
        (b"220 mail\r\n\r\n", "it is not HTTP, or broke off (ValueError)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "it is not HTTP, or broke off (IncompleteReadError)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", None),
        (b"", "it is not HTTP, or broke off (IncompleteReadError)"),
    ],
)
def test_what_is_no_such_server_is_said_to_be_none(
    command: str, raw: bytes, said: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("hello\n\n"))
    said = said or {"bench": "what it says is not JSON", "chat": "its stream of events broke off"}[command]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_say, args=(listening, raw), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert main([command, url]) == 1
    assert capsys.readouterr().err == (
        f"error: {url} does not answer as a server with OpenAI's API does: {said}\n"
        "  try: the address of a server with OpenAI's API\n"
    )


def _say(listening: socket.socket, raw: bytes) -> None:
    """Say the same to whoever comes first."""
    with listening.accept()[0] as connection:
        connection.recv(1 << 16)
        connection.sendall(raw)


def test_a_key_that_is_empty_is_not_taken_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--api-key", "", "--show"]) == 1
    assert capsys.readouterr().err.startswith("error: --api-key is empty, so any client could ask\n")


@pytest.mark.parametrize("command", ["bench", "chat"])
def test_a_key_that_is_missing_is_what_to_type(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("hello\n\n"))
    with running(RepeatingEngine(), key="sesame") as here:
        assert main([command, here.url]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: the server refuses: ")
    assert said.endswith("  try: --api-key KEY\n")


def test_a_signal_ends_it_and_it_says_what_it_did(served: Any) -> None:
    serving = served[2]
    serving.send_signal(signal.SIGTERM)
    said, _ = serving.communicate(timeout=60)
    assert json.loads(said)["num_answered"] >= 1
    assert serving.returncode == 0


def test_the_256_requests_are_those_that_others_are_measured_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["num_requests"], shown["input_tokens"], shown["output_tokens"]) == (256, 142_827, 133_966)
