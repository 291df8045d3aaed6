"""Parameters against the real modules: every name, every shape, every total."""

from typing import Any

import pytest
import torch
import transformers as hf

from shardwise.model.catalogue import CATALOGUE, get_model
from shardwise.model.config import READERS, read_config
from shardwise.model.model import Model
from shardwise.model.share import Share
from tests.model.families import CONFIGURATIONS, build

# Totals that are printed elsewhere: by the repositories of the weights, or by who counted the real modules. Where the
# two differ (Llama 2's weights hold its rotary tables too) it is the count of parameters.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "falcon-180b": 179_522_565_120,
    "bloom-176b": 176_247_271_424,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-12b": 11_846_072_320,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-base": 247_577_856,
    "bert-base": 109_514_298,
    "vit-base-16": 86_567_656,
    "resnet-50": 25_557_032,
}


def own_parameters(model: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter, tied ones once: what `named_parameters` of a module gives."""
    again = {name for tie in model.ties for name in tie[1:]}
    return {name: parameter.shape for _, name, parameter in model.parameters() if name not in again}


def real_parameters(configuration: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        module = build(configuration)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_a_family_has_the_parameters_of_its_module_by_name_and_shape(family: str) -> None:
    configuration = CONFIGURATIONS[family]
    model = read_config(configuration.to_dict())
    real = real_parameters(configuration)
    assert own_parameters(model) == real
    assert model.num_parameters == sum(torch.Size(shape).numel() for shape in real.values())


def test_every_family_that_is_read_is_held_against_its_module() -> None:
    compared = {configuration.model_type for configuration in CONFIGURATIONS.values()}
    # These name the part that reads of a larger model, or have the layers of Llama.
    assert compared | {"gemma3", "llama4", "internlm"} == set(READERS)


@pytest.mark.parametrize("name", ["llama3.1-405b", "mixtral-8x22b", "deepseek-v3", "gemma3-27b", "falcon-180b"])
def test_a_catalogue_entry_at_full_width_has_the_parameters_of_its_module(name: str) -> None:
    """Three layers of it: enough for a dense and a sparse one, and quick."""
    values = {**CATALOGUE[name], "num_hidden_layers": 3}
    configuration = hf.AutoConfig.for_model(**values)
    assert own_parameters(read_config(values)) == real_parameters(configuration)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_catalogue_entry_has_as_many_parameters_as_are_printed_elsewhere(name: str) -> None:
    assert get_model(name).num_parameters == PUBLISHED[name]


def test_version_1_1_of_t5_has_a_head_of_its_own_which_transformers_5_ties() -> None:
    values = CATALOGUE["t5-v1.1-small"]
    ours = read_config(values)
    real = real_parameters(hf.T5Config(**{key: value for key, value in values.items() if key != "model_type"}))
    assert own_parameters(ours) == {**real, "lm_head.weight": (32128, 512)}


@pytest.mark.parametrize(
    ("name", "active"),
    [("mixtral-8x7b", 12.88e9), ("qwen3-30b-a3b", 3.35e9), ("deepseek-v3", 37.55e9), ("gpt-oss-120b", 5.71e9)],
)
def test_of_the_experts_only_those_a_token_is_sent_to_are_active(name: str, active: float) -> None:
    assert get_model(name).num_active_parameters == pytest.approx(active, rel=1e-3)


def test_routers_and_experts_are_marked() -> None:
    layer = {block.kind: block for block, _ in get_model("gpt-oss-20b").kinds}["moe"]
    roles = {parameter.name: parameter for parameter in layer.parameters}
    assert roles["mlp.router.weight"].role == "router"
    experts = {name for name, parameter in roles.items() if parameter.is_expert}
    assert experts == {
        f"mlp.experts.{part}" for part in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    }


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallel_ranks_share_a_layer_but_for_its_norms(tp: int) -> None:
    layer = get_model("llama3.1-8b").kinds[1][0]
    norms = 2 * 4096
    assert layer.num_parameters_on(Share(tp=tp)) == (layer.num_parameters - norms) // tp + norms


def test_keys_and_values_are_repeated_where_there_are_more_ranks_than_heads_of_them() -> None:
    layer = get_model("llama3.1-8b").kinds[1][0]
    by_name = {parameter.name: parameter for parameter in layer.parameters}
    assert by_name["self_attn.k_proj.weight"].count_on(Share(tp=16)) == 128 * 4096
    assert by_name["self_attn.q_proj.weight"].count_on(Share(tp=16)) == 256 * 4096
    fused = {each.name: each for each in get_model("falcon-7b").kinds[1][0].parameters}
    qkv = fused["self_attention.query_key_value.weight"]
    assert qkv.count_on(Share(tp=71)) == 3 * 64 * 4544  # One query, and the one key and value that all share.


def test_experts_are_spread_over_their_own_ranks_and_the_rest_is_not() -> None:
    layer = get_model("mixtral-8x7b").kinds[1][0]
    experts = 8 * 3 * 4096 * 14336
    assert layer.num_expert_parameters_on(Share(ep=4)) == experts // 4
    assert layer.num_expert_parameters_on(Share(ep=4, expert_tp=2, tp=2)) == experts // 8
    assert layer.num_parameters_on(Share(ep=8)) == layer.num_parameters - experts * 7 // 8


def test_the_vocabulary_is_cut_to_the_largest_part() -> None:
    embedding = get_model("gpt2").kinds[0][0]
    positions = 1024 * 768
    assert embedding.num_parameters_on(Share(tp=8)) == 6283 * 768 + positions
