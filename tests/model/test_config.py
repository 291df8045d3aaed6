"""A config.json read, and what is said of one that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ShardwiseError
from shardwise.model.catalogue import CATALOGUE
from shardwise.model.config import read_config
from shardwise.model.operations import Attention
from shardwise.model.share import Share

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def read_error(values: Any) -> tuple[str, str | None]:
    with pytest.raises(ShardwiseError) as caught:
        read_config(values)
    return caught.value.problem, caught.value.remedy


def test_a_file_is_read_by_its_path_or_its_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    by_file, by_folder = read_config(folder / "config.json"), read_config(folder)
    assert by_file.name == by_folder.name == "my-model"
    assert by_file.to_dict() == by_folder.to_dict() == {**read_config(LLAMA).to_dict(), "name": "my-model"}


def test_of_a_model_that_sees_the_part_that_reads_is_read() -> None:
    inner = dict(CATALOGUE["gemma3-4b"])
    outer = {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 1152}}
    assert read_config(outer).num_parameters == read_config(inner).num_parameters


def attentions(values: Any) -> list[Attention]:
    blocks = read_config(values).blocks
    return [each for block in blocks for each in block.operations if isinstance(each, Attention)]


def test_windows_are_where_each_family_has_them() -> None:
    few = {"num_hidden_layers": 6}
    gemma3 = attentions({**CATALOGUE["gemma3-27b"], **few})
    assert [each.window for each in gemma3] == [1024] * 5 + [None]
    gpt_oss = attentions({**CATALOGUE["gpt-oss-20b"], **few})
    assert [each.window for each in gpt_oss] == [128, None] * 3
    mistral = attentions({**CATALOGUE["mistral-7b-v0.1"], **few})
    assert [each.window for each in mistral] == [4096] * 6
    llama4 = attentions({**CATALOGUE["llama4-scout-17b-16e"], **few})
    assert [each.chunk for each in llama4] == [8192, 8192, 8192, None, 8192, 8192]


def test_layer_types_say_more_than_a_rule() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    values = {**CATALOGUE["gemma2-2b"], "num_hidden_layers": 3, "layer_types": types}
    assert [each.window for each in attentions(values)] == [None, 4096, 4096]


def test_qwen_slides_its_window_only_if_it_says_so() -> None:
    values = {**CATALOGUE["qwen2-7b"], "num_hidden_layers": 4, "sliding_window": 512, "max_window_layers": 2}
    assert [each.window for each in attentions(values)] == [None] * 4
    assert [each.window for each in attentions({**values, "use_sliding_window": True})] == [None, None, 512, 512]


def test_dense_layers_stand_where_each_family_has_them() -> None:
    def kinds(name: str, **more: Any) -> list[str]:
        blocks = read_config({**CATALOGUE[name], "num_hidden_layers": 6, **more}).blocks
        return [block.kind for block in blocks[1:-1]]

    assert kinds("deepseek-v3") == ["dense"] * 3 + ["moe"] * 3
    assert kinds("qwen3-30b-a3b", decoder_sparse_step=2) == ["dense", "moe"] * 3
    assert kinds("llama4-maverick-17b-128e") == [
        "chunked dense",
        "chunked moe",
        "chunked dense",
        "full moe",
        "chunked dense",
        "chunked moe",
    ]


def test_dropout_is_read_from_the_configuration() -> None:
    dry = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 100}
    quiet = {**dry, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    layers = [read_config(values).kinds[1][0] for values in (dry, quiet)]
    masks = [layer.saved_bytes(Share()) for layer in layers]
    assert masks[0] - masks[1] == 2 * 64


def test_an_unknown_family_is_answered_with_how_to_give_the_module() -> None:
    problem, remedy = read_error({"model_type": "qwen4"})
    assert problem.startswith(
        "the configuration is of the family 'qwen4', whose layers are not known here; known: bert, bloom,"
    )
    assert remedy == (
        '"model_type": "qwen3" if it has the layers of qwen3, '
        "or give the module itself: shardwise.model.trace.trace_model(module, example_batch)"
    )
    assert read_error({"model_type": "rwkv"})[1] == (
        "give the module itself: shardwise.model.trace.trace_model(module, example_batch)"
    )


def test_a_missing_or_foolish_value_is_named() -> None:
    without = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    assert read_error(without) == ("the configuration says nothing about hidden_size", '"hidden_size": 32')
    assert read_error({**LLAMA, "num_hidden_layers": 0})[0] == (
        "the configuration has num_hidden_layers = 0; it must be a whole number of at least 1"
    )
    assert read_error({**LLAMA, "vocab_size": "many"})[0] == (
        "the configuration has vocab_size = 'many'; it must be a whole number of at least 1"
    )
    assert read_error({**LLAMA, "num_attention_heads": 7}) == (
        "the configuration has a hidden width of 64 and 7 heads, which do not divide it",
        '"head_dim": 9, or a number of heads that divides 64',
    )
    assert read_error({"hidden_size": 64})[0] == "the configuration has no model_type, so its family is not known"
    assert read_error({**CATALOGUE["vit-base-16"], "image_size": 225})[0] == (
        "the configuration has images of 225 pixels a side, which patches of 16 do not divide"
    )
    pattern = {**CATALOGUE["nemotron-3-nano-30b-a3b"], "hybrid_override_pattern": "MXE"}
    assert read_error(pattern)[0].endswith("but 'X' in it")


def test_a_file_that_is_none_is_answered_with_what_one_looks_like(tmp_path: Path) -> None:
    assert read_error(tmp_path / "config.json")[0].endswith("config.json cannot be read: No such file or directory")
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    assert read_error(broken)[0].startswith("broken.json is not valid JSON")
    broken.write_text("[1]", encoding="utf-8")
    assert read_error(broken) == (
        "broken.json is not a JSON object",
        "a config.json as Hugging Face writes it, with a model_type like llama",
    )
