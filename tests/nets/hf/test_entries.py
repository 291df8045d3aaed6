"""Entries of a `config.json` that are absent, null or there twice mean what they mean to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from shardwise.errors import ShardwiseError
from shardwise.nets.hf import load_model
from shardwise.nets.hf.catalogue import FAMILIES
from shardwise.nets.hf.entries import Entries
from shardwise.nets.settings import Heads
from tests.nets.closeness import assert_close
from tests.nets.families import CONFIGS, save_theirs, tokens

_ABSENT = object()


def settings(family: str, kind: str, **changed: Any) -> Any:
    """What is read of a family's small model whose entries have been changed or removed."""
    entries = {**CONFIGS[family]().to_dict(), **changed}
    return FAMILIES[kind].read(Entries({key: value for key, value in entries.items() if value is not _ABSENT}))


def test_a_window_that_is_absent_is_the_familys_and_one_that_is_null_is_none() -> None:
    assert settings("mistral", "mistral", sliding_window=_ABSENT).window == hf.MistralConfig().sliding_window
    assert settings("mistral", "mistral", sliding_window=None).window is None
    assert settings("mixtral", "mixtral", sliding_window=_ABSENT).window is hf.MixtralConfig().sliding_window


def test_what_a_head_of_qwen3_has_is_not_the_width_over_the_heads() -> None:
    heads = settings("qwen3", "qwen3", head_dim=_ABSENT).attention
    assert isinstance(heads, Heads)
    assert heads.head_dim == hf.Qwen3Config().head_dim


def test_null_is_false_where_it_is_so_in_transformers() -> None:
    assert not settings("deepseek-v3", "deepseek_v3", norm_topk_prob=None).mixture.normalised
    assert settings("deepseek-v3", "deepseek_v3", norm_topk_prob=_ABSENT).mixture.normalised
    assert not settings("deepseek-v3", "deepseek_v3", rope_interleave=None).rope.interleaved


def test_sizes_of_gpt2_have_two_names() -> None:
    assert settings("gpt2", "gpt2", n_head=_ABSENT, num_attention_heads=2).attention.num_heads == 2
    with pytest.raises(ShardwiseError, match="num_attention_heads=2, and only 4 is computed here"):
        settings("gpt2", "gpt2", num_attention_heads=2)


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 10.0}},
        {"original_max_position_embeddings": 12},
    ],
    ids=["both forms", "the length of training twice"],
)
@torch.no_grad()
def test_positions_said_twice_are_those_of_transformers(changed: dict[str, Any], tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    theirs, ids = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tokens(length=40)
    assert_close(load_model(tmp_path)(ids), theirs(ids).logits)


@torch.no_grad()
def test_a_head_of_its_own_is_used_whatever_the_config_says_of_ties(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    config, ids = json.loads((tmp_path / "config.json").read_text()), tokens()
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = load_model(tmp_path)
    assert not ours.settings.tied
    assert_close(ours(ids), theirs(ids).logits)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_model(tmp_path).settings.tied, "a copy is no head of its own"
