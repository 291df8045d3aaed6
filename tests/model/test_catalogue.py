"""Models by name, however it is spelt."""

import pytest

from shardwise.errors import ShardwiseError
from shardwise.model.catalogue import ALIASES, CATALOGUE, find_name, get_model

# What the issue asks for, one of each.
FAMILIES = {
    "gpt2",
    "gpt_oss",
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "phimoe",
    "falcon",
    "bloom",
    "opt",
    "mpt",
    "gpt_neox",
    "deepseek_v2",
    "deepseek_v3",
    "nemotron",
    "nemotron_h",
    "t5",
    "bert",
    "vit",
    "resnet",
}


def test_every_family_is_in_the_catalogue() -> None:
    assert {values["model_type"] for values in CATALOGUE.values()} == FAMILIES


@pytest.mark.parametrize("name", [*CATALOGUE, *ALIASES])
def test_every_name_gives_a_model_that_knows_its_own(name: str) -> None:
    model = get_model(name)
    assert model.name == ALIASES.get(name, name)
    assert model.num_parameters > 0
    assert model.num_layers > 1


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("meta-llama/Llama-3.1-405B-Instruct", "llama3.1-405b"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("LLaMA-13B", "llama-13b"),
        ("Llama3-70B", "llama3-70b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("Qwen3_30B_a3B (tokendrop)", "qwen3-30b-a3b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("google/gemma-2-2b-it", "gemma2-2b"),
        ("google/gemma-2b", "gemma-2b"),
        ("DeepSeekV3", "deepseek-v3"),
        ("GPT-OSS-120B", "gpt-oss-120b"),
        ("Nemotron_3_Nano", "nemotron-3-nano-30b-a3b"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", None),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("gpt5", None),
    ],
)
def test_a_name_is_known_as_publishers_write_it(spelt: str, name: str | None) -> None:
    assert find_name(spelt) == name


def test_no_two_names_are_spelt_alike() -> None:
    assert {find_name(name) for name in CATALOGUE} == set(CATALOGUE)
    assert all(find_name(alias) == name for alias, name in ALIASES.items())


def test_an_unknown_name_is_answered_with_the_nearest_and_the_other_ways() -> None:
    with pytest.raises(ShardwiseError) as caught:
        get_model("lama3.1-405b")
    assert caught.value.problem.startswith(f"unknown model 'lama3.1-405b'; {len(CATALOGUE)} are known, of the families")
    assert caught.value.remedy == (
        "llama3.1-405b, or the path of a config.json, "
        "or give the module itself: shardwise.model.trace.trace_model(module, example_batch)"
    )
