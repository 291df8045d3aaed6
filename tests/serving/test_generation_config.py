"""What a model's authors say of its sampling holds for requests that say nothing, as in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.serving.generation_config import read_ends, read_suggested
from shardwise.serving.served import read_words
from tests.nets.families import save_theirs
from tests.serving.answers import expected, prompts


def write(folder: Path, **entries: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(entries), encoding="utf-8")


@pytest.mark.parametrize(
    ("entries", "sampling", "left_out"),
    [
        ({}, {}, ()),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}, ()),
        ({"temperature": 1.0, "top_p": None, "top_k": 0, "num_beams": 1, "bad_words_ids": []}, {}, ()),
        ({"do_sample": False, "top_p": 0.8, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}, ()),
        ({"num_beams": 4, "suppress_tokens": [3]}, {}, ("num_beams=4", "suppress_tokens=[3]")),
    ],
)
def test_what_the_file_suggests(
    entries: dict[str, Any], sampling: dict[str, float], left_out: tuple[str, ...], tmp_path: Path
) -> None:
    write(tmp_path, **entries)
    assert read_suggested(tmp_path) == (sampling, left_out)


def test_the_file_counts_more_than_the_config_for_what_ends_a_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}', encoding="utf-8")
    assert read_ends(tmp_path) == {5}
    write(tmp_path, eos_token_id=[7, 9])
    assert read_ends(tmp_path) == {7, 9}
    write(tmp_path, eos_token_id="</s>")
    with pytest.raises(ShardwiseError, match=r"generation_config.json has eos_token_id='</s>', which is no token"):
        read_ends(tmp_path)


def test_what_is_not_applied_is_said_and_what_no_request_could_ask_is_refused(tmp_path: Path) -> None:
    write(tmp_path, num_beams=4)
    with pytest.warns(UserWarning, match=r"generation_config.json has num_beams=4, which is not applied here"):
        read_words("bytes", read_suggested(tmp_path))
    write(tmp_path, temperature=7)
    with pytest.raises(ShardwiseError, match=r"generation_config.json: temperature .*2"):
        read_words("bytes", read_suggested(tmp_path))


def test_greedy_tokens_are_those_of_transformers_with_the_files_penalty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_theirs("llama", tmp_path)
    write(tmp_path, repetition_penalty=1.8, eos_token_id=[96, 95], do_sample=True, temperature=0.7)
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    given = prompts(4)
    bodies: list[dict[str, Any]] = [
        {"prompt": list(each), "max_tokens": 12, "temperature": 0, "return_token_ids": True} for each in given
    ]
    bodies.append({**bodies[0], "repetition_penalty": 1, "ignore_eos": True})
    rows = [json.dumps({"custom_id": str(number), "body": each}) for number, each in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["generate", str(tmp_path), "--requests", str(tmp_path / "in.jsonl"), "--save", str(tmp_path / "out.jsonl")]
    assert main([*words, "--kv", "1MiB"]) == 0
    answers = [json.loads(row)["response"]["body"] for row in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = [each["choices"][0]["token_ids"] for each in answers]
    assert found[:-1] == [expected(theirs, prompt) for prompt in given]
    plain = save_theirs("llama", tmp_path / "plain")
    assert found[-1] == expected(plain, given[0])
    assert found[-1] != found[0], "a request's own penalty counts more"
