"""An engine in a process of its own answers as it does here, fails as it does here, and comes back."""

import os
import signal
import time
from argparse import Namespace
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ShardwiseError
from shardwise.serving import engine_process
from shardwise.serving.engine_process import EngineProcess
from shardwise.serving.reading import Reading, look_at_model
from shardwise.serving.request import Request, Sampling, Token
from tests.nets.families import save_theirs
from tests.serving.http.repeating import Elsewhere, RepeatingEngine, load_none
from tests.serving.http.serving_here import running, served_by
from tests.serving.http.test_overload import wait_until
from tests.serving.text.test_text import byte_level


def ask(name: str, text: str, **options: Any) -> Request:
    return Request(id=name, prompt=tuple(text.encode()), sampling=Sampling(max_tokens=20, temperature=0, **options))


def answers(engine: EngineProcess) -> dict[str, list[Token]]:
    told: dict[str, list[Token]] = {}
    while engine.has_work():
        for token in engine.step():
            told.setdefault(token.request, []).append(token)
    return told


def test_what_is_asked_is_answered_refused_and_failed_in_the_engines_words() -> None:
    with closing(EngineProcess(Elsewhere)) as engine:
        for name in ("a", "b"):
            engine.add(ask(name, f"say: {name * 3}"))
        assert engine.load().num_waiting == 2  # On their way.
        engine.add(ask("c", "what?", logprobs=1))
        told = answers(engine)
        assert {name: bytes(each.token or 0 for each in told[name][:-1]) for name in "ab"} == {
            "a": b"aaa", "b": b"bbb",
        }  # fmt: skip
        assert [each.finish for each in told["a"]] == [None, None, None, "stop"]
        assert told["c"] == [Token(request="c", token=None, finish="failed", failure="questions are not answered")]
        assert engine.load().num_waiting == engine.load().num_running == 0
        engine.wake()
        assert engine.step() == []
        assert not engine._woken.poll(0), "what ends its wait for tokens has been read"
        with pytest.raises(ShardwiseError, match="token 999 is outside the vocabulary"):
            engine.add(Request(id="d", prompt=(999,), sampling=Sampling(max_tokens=1)))
        engine.add(ask("e", "stop!"))
        with pytest.raises(ShardwiseError, match="RuntimeError: an exclamation"):
            answers(engine)
        engine.recover()
        engine.add(ask("f", "say: x", logprobs=2))
        (first, _) = answers(engine)["f"]
        assert first.logprob is not None
        assert len(first.logprob.top) == 2
        # Both sides send more than a pipe holds, at once.
        for number in range(3):
            engine.add(replace(ask(f"long {number}", "what?"), salt="x" * (1 << 20)))
            engine._send()
        assert [each[0].finish for each in answers(engine).values()] == ["failed"] * 3


def test_a_process_that_is_killed_is_told_of_over_http_and_another_comes() -> None:
    engine = EngineProcess(Elsewhere)
    with running(engine, served=served_by(RepeatingEngine())) as here, here.client() as client:
        assert here.complete(prompt="say: one").json()["choices"][0]["text"] == "one"
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes"]}}}
        said = here.chat("letters", response_format=form, max_tokens=20).json()["choices"][0]
        assert (said["message"]["content"], said["finish_reason"]) == ('"yes"', "stop")
        killed = engine.process_id
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: engine.process_id != killed)
        wait_until(lambda: client.get("/health").status_code == 200)
        assert here.complete(prompt="say: two").json()["choices"][0]["text"] == "two"
    with pytest.raises(ProcessLookupError):
        os.kill(engine.process_id or 0, 0)


def test_what_cannot_be_loaded_is_refused_here() -> None:
    with pytest.raises(ShardwiseError, match="there is no such model") as caught:
        EngineProcess(load_none)
    assert caught.value.remedy == "another one"


def test_an_engine_that_is_started_again_has_the_model_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a newer run is there by then, and new files of the model are said."""
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("old", 1), ("new", 2)):
        save_theirs("llama", tmp_path / "runs" / name)
        (tmp_path / "runs" / name / "manifest.json").write_text("{}", encoding="utf-8")
        os.utime(tmp_path / "runs" / name / "manifest.json", (seconds, seconds))
    arguments = Namespace(model=None, random_weights=False)
    reading = Reading(arguments)
    with closing(EngineProcess(Elsewhere, first=partial(look_at_model, arguments), meanwhile=reading.look)) as engine:
        assert arguments.model == "runs/new"
        assert reading.words is not None
        os.utime(tmp_path / "runs" / "old" / "manifest.json", (3, 3))
        (tmp_path / "runs" / "new" / "model.safetensors").write_bytes(b"other weights")
        os.kill(engine.process_id or 0, signal.SIGKILL)
        engine._process.join()
        with pytest.warns(UserWarning, match="the files of runs/new have changed: from now on the new weights are"):
            engine.recover()
        engine.add(ask("a", "say: a"))
        assert list(answers(engine)) == ["a"]


def test_a_model_whose_texts_have_other_tokens_by_now_is_not_served_on(tmp_path: Path) -> None:
    """Prompts are written in the HTTP process, with the tokenizer of the first start."""
    save_theirs("llama", tmp_path)
    made = byte_level()
    made.save(str(tmp_path / "tokenizer.json"))
    arguments = Namespace(model=str(tmp_path), random_weights=False)
    reading = Reading(arguments)
    reading.look(look_at_model(arguments))
    made.save(str(tmp_path / "tokenizer.json"), pretty=False)  # The same, in another form.
    with pytest.warns(UserWarning, match="have changed: from now on the new weights are served"):
        reading.look(look_at_model(arguments))
    made.add_tokens(["more"])
    made.save(str(tmp_path / "tokenizer.json"))
    for _ in range(2):  # It is tried again and again.
        with pytest.raises(ShardwiseError, match=r"the tokenizer, the chat template or .* has changed"):
            reading.look(look_at_model(arguments))
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    with pytest.raises(ShardwiseError, match="the chat template"):
        reading.look(look_at_model(arguments))


def test_an_engine_that_stands_still_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_LONG_STEP_SECONDS", 1.0)
    with closing(EngineProcess(Elsewhere)) as engine:
        os.kill(engine.process_id or 0, signal.SIGSTOP)
        time.sleep(1.1)
        assert engine.load().trouble is None  # It has nothing to do.
        engine.add(ask("a", "say: a"))
        wait_until(lambda: engine.step() or engine.load().trouble == "no step has ended for 1 s")
        os.kill(engine.process_id or 0, signal.SIGCONT)
        assert list(answers(engine)) == ["a"]
        assert engine.load().trouble is None


def test_what_is_known_before_weights_are_read_can_end_the_start() -> None:
    def refuse(found: Any) -> None:
        raise ShardwiseError(f"no {found}", remedy="another one")

    begun = time.monotonic()
    with pytest.raises(ShardwiseError, match="no tokenizer"):
        EngineProcess(partial(time.sleep, 60), first=partial(str, "tokenizer"), meanwhile=refuse)
    assert time.monotonic() - begun < 50
