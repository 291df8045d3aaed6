"""DeepSeek-V2 and V3: latent attention, and experts of which some are shared."""

from typing import Any

from shardwise.nets.hf.dense import read_dropout, write_dropout
from shardwise.nets.hf.entries import Entries
from shardwise.nets.hf.family import Family
from shardwise.nets.hf.mixtures import experts_naming
from shardwise.nets.hf.rope import read_rope, write_rope
from shardwise.nets.settings import Latent, Mixture, Mlp, Settings


def _read(entries: Entries, mixture: Mixture, *, interleaved: bool, mlp_bias: bool = False) -> Settings:
    entries.must_be("hidden_act", "silu")
    entries.must_be("moe_layer_freq", 1)
    return Settings(
        vocabulary=entries.integer("vocab_size"),
        width=entries.integer("hidden_size"),
        num_layers=entries.integer("num_hidden_layers"),
        length=entries.integer("max_position_embeddings"),
        attention=Latent(
            num_heads=entries.integer("num_attention_heads"),
            q_rank=None if entries.find("q_lora_rank") is None else entries.integer("q_lora_rank"),
            kv_rank=entries.integer("kv_lora_rank", 512),
            nope_dim=entries.integer("qk_nope_head_dim", 128),
            rope_dim=entries.integer("qk_rope_head_dim", 64),
            value_dim=entries.integer("v_head_dim", 128),
            bias=entries.flag("attention_bias", False),
        ),
        mlp=Mlp(width=entries.integer("intermediate_size"), bias=mlp_bias),
        mixture=mixture,
        rope=read_rope(entries, interleaved=interleaved),
        norm_epsilon=entries.number("rms_norm_eps", 1e-6),
        tied=entries.flag("tie_word_embeddings", False),
        dropout=read_dropout(entries),
    )


def _write(settings: Settings) -> dict[str, Any] | None:
    sizes, mixture = settings.attention, settings.mixture
    if not isinstance(sizes, Latent) or mixture is None or settings.rope is None:
        return None
    return {
        "vocab_size": settings.vocabulary,
        "hidden_size": settings.width,
        "num_hidden_layers": settings.num_layers,
        "max_position_embeddings": settings.length,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_heads,
        "q_lora_rank": sizes.q_rank,
        "kv_lora_rank": sizes.kv_rank,
        "qk_nope_head_dim": sizes.nope_dim,
        "qk_rope_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.value_dim,
        "attention_bias": sizes.bias,
        "intermediate_size": settings.mlp.width,
        "hidden_act": settings.mlp.activation,
        "rms_norm_eps": settings.norm_epsilon,
        "tie_word_embeddings": settings.tied,
        **write_dropout(settings),
        **write_rope(settings.rope),
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
    # DeepSeek's own code and transformers' differ in what they make of true.
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
    return _read(entries, mixture, interleaved=True, mlp_bias=entries.flag("mlp_bias", False))


def _write_v2(settings: Settings) -> dict[str, Any] | None:
    config, mixture = _write(settings), settings.mixture
    if config is None or mixture is None:
        return None
    has_groups = mixture.num_groups > 1
    return {**config, "topk_method": "group_limited_greedy" if has_groups else "greedy", "scoring_func": "softmax"}


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
    return _read(entries, mixture, interleaved=entries.flag("rope_interleave", True))


def _write_v3(settings: Settings) -> dict[str, Any] | None:
    config = _write(settings)
    if config is None or settings.rope is None:
        return None
    chosen = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return {**config, **chosen, "rope_interleave": settings.rope.interleaved}


def _first_layers(entries: Entries, default: int) -> tuple[int, ...]:
    num_layers = entries.integer("num_hidden_layers")
    return tuple(range(min(entries.integer("first_k_dense_replace", default), num_layers)))


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    read=_read_v2,
    write=_write_v2,
    naming=experts_naming,
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read_v3,
    write=_write_v3,
    naming=experts_naming,
    has_layers_beyond=True,
)
