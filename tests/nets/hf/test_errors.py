"""What can be wrong with a folder, and the sentence that says so."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.nets.hf import load, load_model, save
from shardwise.nets.settings import Heads
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import weights_of
from tests.nets.families import save_theirs

Tensors = dict[str, Tensor]


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changed: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))


def said(folder: Path) -> str:
    with pytest.raises(ShardwiseError) as caught:
        load_model(folder)
    return str(caught.value).replace(str(folder), "FOLDER")


UP = "model.layers.1.mlp.up_proj.weight"


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    change_tensors(tmp_path, lambda tensors: [tensors.pop(name) for name in sorted(tensors) if ".2.mlp" in name])
    assert said(tmp_path) == (
        "FOLDER lacks model.layers.2.mlp.gate_proj.weight, model.layers.2.mlp.up_proj.weight,"
        " model.layers.2.mlp.down_proj.weight\n"
        "  try: download it again, or check that config.json is of these weights"
    )


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({f"visual.{n}": torch.zeros(2) for n in range(5)}))
    assert said(tmp_path) == (
        "FOLDER has tensors that its config.json does not explain: visual.0, visual.1, visual.2 and 2 more\n"
        "  try: the config.json of these"
    )


def test_wrong_shapes_are_told_with_both(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({UP: tensors[UP][:40].clone()}))
    assert said(tmp_path) == (
        f"{UP} in FOLDER is [40, 32], and by config.json it would be [48, 32]\n  try: the config.json of these weights"
    )


def test_tensors_that_nobody_needs_are_left_alone(tmp_path: Path) -> None:
    more = {
        "llama, tied": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)},
        "deepseek-v3": {"model.layers.4.eh_proj.weight": torch.zeros(3)},
        "gpt2": {"transformer.h.0.attn.bias": torch.zeros(1, 1, 3, 3)},
    }
    for family, tensors in more.items():
        save_theirs(family, tmp_path / family)
        change_tensors(tmp_path / family, partial(_add, tensors))
        load_model(tmp_path / family)


def _add(tensors: Tensors, held: Tensors) -> None:
    held.update(tensors)


def test_the_first_folders_of_gpt2_have_names_without_a_prefix(tmp_path: Path) -> None:
    save_theirs("gpt2", tmp_path)
    expected = load_model(tmp_path).state_dict()

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change_tensors(tmp_path, strip)
    found = load_model(tmp_path).state_dict()
    assert all(found[name].equal(expected[name]) for name in expected)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lama"}, "unknown model_type 'lama'; known: llama, mistral, qwen2, qwen3, mixtral, qwen3_moe,"),
    (
        {"hidden_size": None},
        "FOLDER/config.json lacks hidden_size\n  try: add hidden_size to it, as transformers writes",
    ),
    ({"hidden_size": "32"}, 'FOLDER/config.json has hidden_size="32", which should be a whole number'),
    ({"hidden_act": "relu"}, 'FOLDER/config.json has hidden_act="relu", and only "silu" is computed here'),
    (
        {"num_key_value_heads": 3},
        "4 heads of queries cannot share 3 heads of keys and values evenly\n  try: a number of",
    ),
    (
        {"quantization_config": {"quant_method": "fp8"}},
        "the weights beside FOLDER/config.json are quantised (fp8), and",
    ),
    (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}},
        "unknown rope_type 'longrope'; known: default, linear, llama3, yarn",
    ),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0, "factor": 2.0}},
        "rope_parameters of FOLDER/config.json lacks low_freq_factor",
    ),
    ({"partial_rotary_factor": 0.5}, "FOLDER/config.json has partial_rotary_factor=0.5, and only 1.0 is computed here"),
]


@pytest.mark.parametrize(("changed", "text"), CONFIGS, ids=[next(iter(changed)) for changed, _ in CONFIGS])
def test_a_config_that_cannot_be_computed_is_refused(changed: dict[str, Any], text: str, tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    change_config(tmp_path, **changed)
    assert said(tmp_path).startswith(text)


def test_folders_that_are_no_models_are_told_from_broken_ones(tmp_path: Path) -> None:
    assert said(tmp_path).startswith(
        "FOLDER has no config.json, so it is not a Hugging Face model\n  try: the folder that"
    )
    save_theirs("llama", tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    files[1].write_bytes(files[1].read_bytes()[:-10])
    assert f"FOLDER/{files[1].name} is not whole: " in said(tmp_path)
    files[1].unlink()
    assert said(tmp_path).startswith(f"model.safetensors.index.json names FOLDER/{files[1].name}, which does not exist")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert said(tmp_path).startswith(
        "FOLDER has neither model.safetensors nor model.safetensors.index.json, and weights"
    )
    (tmp_path / "config.json").write_text("{")
    assert said(tmp_path).startswith("FOLDER/config.json is not JSON: ")


def test_a_module_of_other_sizes_is_refused(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    settings = load_model(tmp_path).settings
    with pytest.raises(ShardwiseError, match=r"embed.weight is \[97, 32\] in .*, but the module holds \[90, 32\]"):
        load(tmp_path, Transformer(replace(settings, vocabulary=90)))
    with pytest.raises(ShardwiseError, match=r"and the part of this process is \[0, 32\], but the module holds"):
        load(tmp_path, Transformer(settings), slices=lambda _, shape: (slice(0), *[slice(None)] * (len(shape) - 1)))
    with pytest.raises(ShardwiseError, match=r"unknown weight 'weight'; known: embed.weight, "):
        load(tmp_path, torch.nn.Linear(2, 2))


def test_only_whole_models_are_saved_and_only_where_none_is(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    model = load_model(tmp_path)
    with pytest.raises(ShardwiseError, match="already has safetensors in it"):
        save(model, tmp_path)
    weights = weights_of(model)
    del weights["norm.weight"]
    with pytest.raises(ShardwiseError, match=r"1 of 39 weights are not here, norm.weight among them"):
        save(weights, tmp_path / "new", settings=model.settings)
    weights["norm.weight"] = torch.ones(31)
    with pytest.raises(ShardwiseError, match=r"norm.weight is \[31\] here, and \[32\] by the settings"):
        save(weights, tmp_path / "new", settings=model.settings)
    assert not (tmp_path / "new").exists()


def test_a_family_that_cannot_say_the_settings_is_refused(tmp_path: Path) -> None:
    save_theirs("qwen3", tmp_path)
    model = load_model(tmp_path)
    with pytest.raises(ShardwiseError, match=r"of llama cannot say attention=Heads\(.*\)\n  try: family='qwen3'"):
        save(model, tmp_path / "new", family="llama")
    with pytest.raises(ShardwiseError, match=r"unknown family 'quen3'(.|\n)*try: qwen3"):
        save(model, tmp_path / "new", family="quen3")
    assert isinstance(model.settings.attention, Heads)
    strange = replace(model.settings, attention=replace(model.settings.attention, output_bias=True))
    with pytest.raises(ShardwiseError, match=r"no family that we write can express all of Settings\(vocabulary=97"):
        save(Transformer(strange), tmp_path / "new")


def test_attention_in_both_directions_is_refused(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    change_config(tmp_path, is_causal=False)
    assert said(tmp_path).startswith("FOLDER/config.json has is_causal=false, and only true is computed here")


def test_heads_whose_numbers_are_no_pairs_are_refused(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    change_config(tmp_path, head_dim=9)
    assert said(tmp_path) == ("positions rotate pairs of numbers, and a head has 9 to rotate\n  try: heads of 10 or 8")


def test_an_adapter_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    assert said(tmp_path).startswith("FOLDER has an adapter, adapter_model.safetensors, and the weights beside it")
