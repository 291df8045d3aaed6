"""Decoders after Llama with experts: Mixtral, Qwen 2 and 3 MoE, GPT-OSS, Phi MoE, Llama 4, DeepSeek."""

from collections.abc import Callable
from dataclasses import replace

from shardwise.model.families.fields import Fields
from shardwise.model.families.llama import late_window
from shardwise.model.families.rotary import (
    EXPERTS,
    attention_of,
    decoder,
    fed_by,
    mixed,
    mlp_of,
    same,
    shared_names,
    sliding,
)
from shardwise.model.model import Model
from shardwise.model.shape import AttentionShape, ExpertsShape, LatentShape, MlpShape, NormShape

ROUTER = {**EXPERTS, "router": "mlp.router"}
_LATENT = {
    "q": "self_attn.q_proj",
    "q_down": "self_attn.q_a_proj",
    "q_norm": "self_attn.q_a_layernorm",
    "q_up": "self_attn.q_b_proj",
    "kv_down": "self_attn.kv_a_proj_with_mqa",
    "kv_norm": "self_attn.kv_a_layernorm",
    "kv_up": "self_attn.kv_b_proj",
    "o": "self_attn.o_proj",
}


def mixtral(fields: Fields, name: str) -> Model:
    """Mixtral: experts in every layer."""
    shape = ExpertsShape(
        names=EXPERTS,
        num_experts=fields.count("num_local_experts", default=8),
        top_k=fields.count("num_experts_per_tok", default=2),
        width=fields.count("intermediate_size"),
    )
    attend = sliding(fields, attention_of(fields), lambda _: True)
    return decoder(fields, name, attend=attend, feed=fed_by(shape))


def qwen2_moe(fields: Fields, name: str) -> Model:
    """Qwen 1.5 and 2 MoE: small experts, and a shared one that is weighed by token."""
    width = fields.values.get("shared_expert_intermediate_size", 5632)
    shared = MlpShape(names=shared_names("mlp.shared_expert"), width=width) if width else None
    shape = ExpertsShape(
        names={**EXPERTS, "shared_gate": "mlp.shared_expert_gate"},
        num_experts=fields.count("num_experts", default=60),
        top_k=fields.count("num_experts_per_tok", default=4),
        width=fields.count("moe_intermediate_size", default=1408),
        shared=shared,
        shared_gate=shared is not None,
    )
    first = fields.count("max_window_layers", default=28)
    slides = fields.flag("use_sliding_window")
    attend = sliding(
        fields,
        attention_of(fields, qkv_bias=fields.flag("qkv_bias", True)),
        lambda index: slides and index < first and index % 2 == 0,
    )
    return decoder(fields, name, attend=attend, feed=mixed(mlp_of(fields), shape, _is_sparse(fields)))


def qwen3_moe(fields: Fields, name: str) -> Model:
    """Qwen 3 MoE: small experts, none shared; norms on queries and keys."""
    bias = fields.flag("attention_bias")
    attention = replace(attention_of(fields, qkv_bias=bias, out_bias=bias), qk_norm="head")
    shape = ExpertsShape(
        names=EXPERTS,
        num_experts=fields.count("num_experts", "num_local_experts", default=128),
        top_k=fields.count("num_experts_per_tok", default=8),
        width=fields.count("moe_intermediate_size", default=768),
    )
    attend = sliding(fields, attention, late_window(fields))
    return decoder(fields, name, attend=attend, feed=mixed(mlp_of(fields), shape, _is_sparse(fields)))


def gpt_oss(fields: Fields, name: str) -> Model:
    """GPT-OSS: biases everywhere, a learned sink of each head, a window in every other layer."""
    attention = replace(attention_of(fields, qkv_bias=True, out_bias=True), sinks=True)
    shape = ExpertsShape(
        names=ROUTER,
        num_experts=fields.count("num_local_experts", default=128),
        top_k=fields.count("num_experts_per_tok", "experts_per_token", default=4),
        width=fields.count("intermediate_size"),
        bias=True,
        router_bias=True,
        transposed=True,
    )
    attend = sliding(fields, attention, lambda index: index % 2 == 0)
    return decoder(fields, name, attend=attend, feed=fed_by(shape))


def phimoe(fields: Fields, name: str) -> Model:
    """Phi 3.5 MoE: layer norm with a bias, and biases of attention and head where the configuration has them."""
    bias = fields.flag("attention_bias")
    shape = ExpertsShape(
        names=ROUTER,
        num_experts=fields.count("num_local_experts", default=16),
        top_k=fields.count("num_experts_per_tok", default=2),
        width=fields.count("intermediate_size"),
    )
    return decoder(
        fields,
        name,
        attend=sliding(fields, attention_of(fields, qkv_bias=bias, out_bias=bias), lambda _: True),
        feed=fed_by(shape),
        norm=NormShape(kind="layer", bias=True),
        head_bias="lm_head.bias" if fields.flag("lm_head_bias") else None,
    )


def llama4(fields: Fields, name: str) -> Model:
    """Llama 4, its language model: attention in chunks but for every fourth layer, one expert and a shared one."""
    layers = range(fields.count("num_hidden_layers"))
    every = fields.count("no_rope_layer_interval", default=4)
    rotated = fields.items("no_rope_layers") or [int((index + 1) % every != 0) for index in layers]
    step = fields.count("interleave_moe_layer_step", default=1)
    sparse = set(fields.items("moe_layers") or range(step - 1, len(layers), step))
    width = fields.count("intermediate_size")
    shape = ExpertsShape(
        names={
            "router": "feed_forward.router",
            "expert_up": "feed_forward.experts.gate_up_proj",
            "expert_down": "feed_forward.experts.down_proj",
        },
        num_experts=fields.count("num_local_experts", default=16),
        top_k=fields.count("num_experts_per_tok", default=1),
        width=width,
        shared=MlpShape(names=shared_names("feed_forward.shared_expert"), width=width),
        transposed=True,
    )
    dense = mlp_of(
        fields, width=fields.count("intermediate_size_mlp", default=16384), names=shared_names("feed_forward")
    )
    full = replace(attention_of(fields), rotary=False)
    chunked = replace(
        full,
        rotary=True,
        chunk=fields.find_count("attention_chunk_size"),
        qk_norm="plain" if fields.flag("use_qk_norm", True) else "none",
    )

    def attend(index: int) -> tuple[str, AttentionShape]:
        return ("chunked", chunked) if rotated[index] else ("full", full)

    return decoder(fields, name, attend=attend, feed=mixed(dense, shape, lambda index: index in sparse))


def deepseek(fields: Fields, name: str) -> Model:
    """DeepSeek V2 and V3, and Moonlight: latent attention, and many small experts after a few dense layers.

    The versions differ in how they route, not in what a token meets.
    """
    width = fields.count("moe_intermediate_size", default=1407)
    shared = fields.find_count("n_shared_experts")
    sparse = ExpertsShape(
        names=EXPERTS,
        num_experts=fields.count("n_routed_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=width,
        shared=MlpShape(names=shared_names("mlp.shared_experts"), width=width * shared) if shared else None,
    )
    latent = LatentShape(
        names=_LATENT,
        heads=fields.count("num_attention_heads"),
        q_rank=fields.find_count("q_lora_rank") or 0,
        kv_rank=fields.count("kv_lora_rank", default=512),
        nope_dim=fields.count("qk_nope_head_dim", default=128),
        rope_dim=fields.count("qk_rope_head_dim", default=64),
        v_dim=fields.count("v_head_dim", default=128),
        bias=fields.flag("attention_bias"),
    )
    num_dense = fields.find_count("first_k_dense_replace") or 0
    feed = mixed(mlp_of(fields), sparse, lambda index: index >= num_dense)
    return decoder(fields, name, attend=same(latent), feed=feed)


def _is_sparse(fields: Fields) -> Callable[[int], bool]:
    """Qwen's rule: every `decoder_sparse_step` layers, except those that are named as MLP only."""
    dense = set(fields.items("mlp_only_layers") or ())
    step = fields.count("decoder_sparse_step", default=1)
    return lambda index: index not in dense and (index + 1) % step == 0
