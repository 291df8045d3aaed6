"""Models from where they lie."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError
from shardwise.serving.identify import identify
from shardwise.serving.load import load_engine
from shardwise.serving.request import Answering
from shardwise.training.checkpoint.index import read_index, write_index
from shardwise.training.convert import convert
from tests.nets.families import save_theirs
from tests.serving.answers import answer, ask, expected, prompts


def test_a_hugging_face_folder_answers_as_transformers_does(tmp_path: Path) -> None:
    theirs = save_theirs("qwen3-moe", tmp_path)
    engine: Answering = load_engine(tmp_path, kv_bytes=2**20, device="cpu")
    prompt = prompts(1)[0]
    assert answer(engine, [ask(prompt)]) == [expected(theirs, prompt)]
    summary = load_engine(tmp_path, kv_bytes=2**20, device="cpu").summary
    assert summary.num_blocks == 2**20 // summary.block_bytes
    assert summary.block_bytes == 4 * 2 * 2 * 8 * 16 * 4  # Layers, keys and values, heads, dim, tokens, fp32.
    assert summary.weight_bytes >= 4 * summary.num_parameters
    assert summary.max_length == 64


def test_a_name_of_the_catalogue_is_served_with_random_weights_alone() -> None:
    with pytest.raises(ShardwiseError, match="has shapes and no weights") as caught:
        load_engine("qwen3-0.6b")
    assert caught.value.remedy == "qwen3-0.6b --random-weights, or the folder that its weights are in"
    with pytest.raises(ShardwiseError, match=r"qwen3-0.6 is not a folder with a config.json") as caught:
        load_engine("qwen3-0.6", random_weights=True)
    assert caught.value.remedy == "qwen3-0.6b"
    with pytest.raises(ShardwiseError, match="is not a folder"):
        load_engine("no/such/thing")


def test_a_cache_that_is_too_small_says_what_is_needed(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    with pytest.raises(ShardwiseError, match="one sequence of 64 tokens needs") as caught:
        load_engine(tmp_path, kv_bytes=10_000, max_length=64, device="cpu")
    assert caught.value.remedy == "--max-length 16, or --kv 32768"
    with pytest.raises(ShardwiseError, match="one sequence of 16 tokens needs") as caught:
        load_engine(tmp_path, kv_bytes=1000, device="cpu")
    assert caught.value.remedy == "--kv 8192", "no length fits into no block"
    with pytest.raises(ShardwiseError, match="a step has at most 4 tokens, one of each of 8 running requests"):
        load_engine(tmp_path, token_budget=4, max_running=8, device="cpu")


def test_a_configuration_is_served_with_random_weights(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "model")
    engine = load_engine(tmp_path / "model" / "config.json", random_weights=True, kv_bytes=2**20, device="cpu")
    assert engine.summary.model == "model"
    (tmp_path / "config.json").write_text("{oh", encoding="utf-8")
    with pytest.raises(ShardwiseError, match=r"config.json is not JSON: "):
        load_engine(tmp_path, random_weights=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_bytes": 2**63}, "--kv of 8192.0 PiB, and "),
        ({"host_bytes": 2**63}, "--kv-host of 8192.0 PiB, and "),
        ({"max_length": 0}, "--max-length 0: a prompt has at least 1 token"),
    ],
)
@pytest.mark.parametrize("plan", [None, "dp=2"])
def test_limits_that_cannot_be_are_refused_before_anything_is_allocated(
    tmp_path: Path, given: dict[str, int], said: str, plan: str | None
) -> None:
    save_theirs("llama", tmp_path)
    with pytest.raises(ShardwiseError) as caught:
        load_engine(tmp_path, plan=plan, device="cpu", **given)  # type: ignore[arg-type]
    assert caught.value.problem.startswith(said)


def test_tiers_are_in_the_summary_and_one_that_helps_little_is_said(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    engine = load_engine(tmp_path, kv_bytes=2**20, host_bytes=2**16, file_bytes=2**22, kv_folder=tmp_path / "kv",
                         device="cpu")  # fmt: skip
    lines = engine.summary.lines()
    size = engine.summary.block_bytes
    engine.close()
    small = "fewer than the cache has, so they are soon evicted again"
    assert f"host      64.0 KiB for evicted blocks: {2**16 // size}, {small}" in lines
    assert f"files     4.0 MiB for evicted blocks: {2**22 // size}" in lines


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("generation_config.json", b"{", "generation_config.json is not JSON: "),
        ("generation_config.json", b"[]", "generation_config.json is not a table of entries"),
        ("config.json", b'\xff{"a": 1}', "config.json is not JSON: "),
        ("tokenizer.model", b"\n", "has a tokenizer.model, and no tokenizer.json, which is the form that is read"),
        ("vocab.json", b"{}", "has a vocab.json, and no tokenizer.json, which is the form that is read"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ShardwiseError, match=re.escape(said)):
        load_engine(str(tmp_path), kv_bytes=2**20)


@pytest.mark.parametrize("content", [b"", b"junk", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40])
def test_a_gguf_file_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ShardwiseError, match=r"a\.gguf is not a GGUF file"):
        load_engine(str(tmp_path / "a.gguf"), kv_bytes=2**20)


def test_a_checkpoint_of_ours_has_the_tokenizer_and_the_ends_of_what_it_began_from(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    save_theirs("llama", theirs)
    (theirs / "tokenizer.json").write_text("{}", encoding="utf-8")
    (theirs / "generation_config.json").write_text('{"eos_token_id": [7, 9]}', encoding="utf-8")
    convert(theirs, tmp_path / "converted")
    found = identify(str(tmp_path / "converted"), random_weights=False)
    assert found.eos_token_ids == {7, 9}
    assert Path(found.tokenizer_source, "tokenizer.json").read_text(encoding="utf-8") == "{}"
    # In a run, what its data was made with counts, also for a checkpoint that is named by itself.
    last = tmp_path / "run" / "checkpoints" / "00000001"
    last.parent.mkdir(parents=True)
    (tmp_path / "converted").rename(last)
    (tmp_path / "run" / "manifest.json").write_text('{"data": {"tokenizer": "words.json"}}', encoding="utf-8")
    found = identify(str(last), random_weights=False)
    assert (found.tokenizer_source, found.eos_token_ids) == ("words.json", frozenset({7, 9}))


def test_a_run_of_a_module_of_ones_own_says_how_it_is_served(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    index = read_index(tmp_path / "ours")
    own = {"source": "mine.py:make", "hf": {"config": {}}}
    write_index(tmp_path / "ours", replace(index, extra={**index.extra, "model": own}))
    with pytest.raises(ShardwiseError, match=r"ours is of the module mine\.py:make, which is served from") as caught:
        load_engine(tmp_path / "ours")
    assert caught.value.remedy == f"shardwise convert {tmp_path / 'ours'} FOLDER --to huggingface, then FOLDER"


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="memory is read from Linux's /proc")
def test_a_cache_on_the_host_takes_memory_as_it_fills(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    save_theirs("llama", tmp_path)
    load_engine(tmp_path, kv_bytes=2**16, device="cpu").close()
    before = resident()
    engine = load_engine(tmp_path, kv_bytes=2**29, device="cpu")
    assert engine.summary.kv_bytes == 2**29
    assert resident() - before < 2**27
    assert len(answer(engine, [ask(prompts(1)[0])])[0]) == 12
