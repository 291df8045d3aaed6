"""Families with experts: Mixtral and Qwen3-MoE, the dense ones with them; DeepSeek-V2 and V3, with latent attention."""

from collections.abc import Collection
from typing import Any

from shardwise.nets.hf.dense import find_window, read_bias, read_gated, read_heads, write_bias, write_gated, write_heads
from shardwise.nets.hf.entries import Entries
from shardwise.nets.hf.family import Family, of_kind
from shardwise.nets.hf.naming import MIXTRAL as MIXTRAL_NAMES
from shardwise.nets.hf.naming import Naming, llama_naming
from shardwise.nets.settings import Latent, Mixture, Rope, Settings


def _auxiliary(entries: Entries) -> float:
    """Return the weight of the balancing loss. These models have one only with `output_router_logits`."""
    asked = entries.flag("output_router_logits", False)
    return entries.number("router_aux_loss_coef", 0.001) if asked else 0.0


def _write_auxiliary(mixture: Mixture) -> dict[str, Any]:
    if not mixture.auxiliary:
        return {}
    return {"output_router_logits": True, "router_aux_loss_coef": mixture.auxiliary}


def _mixtral_naming(names: Collection[str]) -> Naming:
    found = llama_naming(names)
    return found if found.is_stacked else Naming(parts=MIXTRAL_NAMES)


def _read_mixtral(entries: Entries) -> Settings:
    mixture = Mixture(
        num_experts=entries.integer("num_local_experts", 8),
        num_chosen=entries.integer("num_experts_per_tok", 2),
        width=entries.integer("intermediate_size"),
        auxiliary=_auxiliary(entries),
    )
    heads, window = read_heads(entries), find_window(entries)
    return read_gated(entries, heads, window=window, mixture=mixture, theta=1e6, norm_epsilon=1e-5)


def _write_mixtral(settings: Settings) -> dict[str, Any]:
    mixture = of_kind(settings.mixture, Mixture)
    return {
        **write_heads(settings),
        "sliding_window": settings.window,
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.num_chosen,
        **_write_auxiliary(mixture),
    }


def _read_qwen3_moe(entries: Entries) -> Settings:
    mixture = Mixture(
        # The second name is that of transformers since version 5.
        num_experts=entries.integer("num_experts", entries.integer("num_local_experts", 128)),
        num_chosen=entries.integer("num_experts_per_tok", 8),
        width=entries.integer("moe_intermediate_size"),
        normalised=entries.flag("norm_topk_prob", False),
        auxiliary=_auxiliary(entries),
        dense_layers=_dense_layers(entries),
    )
    window = find_window(entries, 4096) if entries.flag("use_sliding_window", False) else None
    heads = read_heads(entries, bias=read_bias(entries), qk_norm=True)
    return read_gated(entries, heads, window=window, mixture=mixture)


def _dense_layers(entries: Entries) -> tuple[int, ...]:
    """Return the dense layers: those named, and all except every `decoder_sparse_step`-th."""
    named, step = entries.find("mlp_only_layers") or [], entries.integer("decoder_sparse_step", 1)
    layers = range(entries.integer("num_hidden_layers"))
    return tuple(layer for layer in layers if layer in named or (layer + 1) % step)


def _write_qwen3_moe(settings: Settings) -> dict[str, Any]:
    mixture = of_kind(settings.mixture, Mixture)
    return {
        **write_heads(settings),
        **write_bias(settings),
        "use_sliding_window": settings.window is not None,
        "sliding_window": settings.window,
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.num_chosen,
        "moe_intermediate_size": mixture.width,
        "norm_topk_prob": mixture.normalised,
        "mlp_only_layers": list(mixture.dense_layers),
        **_write_auxiliary(mixture),
    }


def _read_deepseek(entries: Entries, mixture: Mixture, *, interleaved: bool, mlp_bias: bool = False) -> Settings:
    entries.must_be("moe_layer_freq", 1)
    latent = Latent(
        num_heads=entries.integer("num_attention_heads"),
        q_rank=None if entries.find("q_lora_rank") is None else entries.integer("q_lora_rank"),
        kv_rank=entries.integer("kv_lora_rank", 512),
        nope_dim=entries.integer("qk_nope_head_dim", 128),
        rope_dim=entries.integer("qk_rope_head_dim", 64),
        value_dim=entries.integer("v_head_dim", 128),
        bias=read_bias(entries),
    )
    return read_gated(entries, latent, mixture=mixture, interleaved=interleaved, mlp_bias=mlp_bias)


def _write_deepseek(settings: Settings) -> dict[str, Any]:
    sizes, mixture = of_kind(settings.attention, Latent), of_kind(settings.mixture, Mixture)
    return {
        **write_gated(settings),
        "num_key_value_heads": sizes.num_heads,
        "q_lora_rank": sizes.q_rank,
        "kv_lora_rank": sizes.kv_rank,
        "qk_nope_head_dim": sizes.nope_dim,
        "qk_rope_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.value_dim,
        "attention_bias": sizes.bias,
        "n_routed_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.num_chosen,
        "moe_intermediate_size": mixture.width,
        "n_shared_experts": mixture.num_shared,
        "first_k_dense_replace": len(mixture.dense_layers),
        "norm_topk_prob": mixture.normalised,
        "routed_scaling_factor": mixture.scale,
        "n_group": mixture.num_groups,
        "topk_group": mixture.num_chosen_groups,
    }


def _read_v2(entries: Entries) -> Settings:
    # DeepSeek's own code and transformers differ in the meaning of true.
    entries.must_be("norm_topk_prob", False)
    entries.must_be("scoring_func", "softmax")
    entries.must_be("topk_method", "greedy", "group_limited_greedy")
    has_groups = entries.text("topk_method", "greedy") == "group_limited_greedy"
    mixture = Mixture(
        num_experts=entries.integer("n_routed_experts", 64),
        num_chosen=entries.integer("num_experts_per_tok"),
        width=entries.integer("moe_intermediate_size", 1407),
        num_shared=entries.integer("n_shared_experts", 2),
        normalised=False,
        scale=entries.number("routed_scaling_factor", 1.0),
        num_groups=entries.integer("n_group") if has_groups else 1,
        num_chosen_groups=entries.integer("topk_group") if has_groups else 1,
        dense_layers=_first_layers(entries, 0),
    )
    return _read_deepseek(entries, mixture, interleaved=True, mlp_bias=entries.flag("mlp_bias", False))


def _write_v2(settings: Settings) -> dict[str, Any]:
    has_groups = of_kind(settings.mixture, Mixture).num_groups > 1
    method = "group_limited_greedy" if has_groups else "greedy"
    return {**_write_deepseek(settings), "topk_method": method, "scoring_func": "softmax"}


def _read_v3(entries: Entries) -> Settings:
    entries.must_be("scoring_func", "sigmoid")
    entries.must_be("topk_method", "noaux_tc")
    mixture = Mixture(
        num_experts=entries.integer("n_routed_experts", 256),
        num_chosen=entries.integer("num_experts_per_tok", 8),
        width=entries.integer("moe_intermediate_size", 2048),
        num_shared=entries.integer("n_shared_experts", 1),
        scores="sigmoid",
        correction=True,
        normalised=entries.flag("norm_topk_prob", True),
        scale=entries.number("routed_scaling_factor", 2.5),
        num_groups=entries.integer("n_group", 8),
        num_chosen_groups=entries.integer("topk_group", 4),
        dense_layers=_first_layers(entries, 3),
    )
    return _read_deepseek(entries, mixture, interleaved=entries.flag("rope_interleave", True))


def _write_v3(settings: Settings) -> dict[str, Any]:
    interleaved = of_kind(settings.rope, Rope).interleaved
    chosen = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": interleaved}
    return {**_write_deepseek(settings), **chosen}


def _first_layers(entries: Entries, default: int) -> tuple[int, ...]:
    num_layers = entries.integer("num_hidden_layers")
    return tuple(range(min(entries.integer("first_k_dense_replace", default), num_layers)))


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    read=_read_mixtral,
    write=_write_mixtral,
    naming=_mixtral_naming,
)
QWEN3_MOE = Family(name="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=_read_qwen3_moe, write=_write_qwen3_moe)
DEEPSEEK_V2 = Family(name="deepseek_v2", architecture="DeepseekV2ForCausalLM", read=_read_v2, write=_write_v2)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read_v3,
    write=_write_v3,
    has_layers_beyond=True,
)
