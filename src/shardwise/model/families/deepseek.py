"""DeepSeek V2 and V3, and Moonlight: multi-head latent attention, many small experts after a few dense layers."""

from shardwise.model.families.fields import Fields
from shardwise.model.families.rotary import EXPERTS, decoder, mixed, mlp_of, same, shared_names
from shardwise.model.model import Model
from shardwise.model.shape import ExpertsShape, LatentShape, MlpShape

_NAMES = {
    "q": "self_attn.q_proj",
    "q_down": "self_attn.q_a_proj",
    "q_norm": "self_attn.q_a_layernorm",
    "q_up": "self_attn.q_b_proj",
    "kv_down": "self_attn.kv_a_proj_with_mqa",
    "kv_norm": "self_attn.kv_a_layernorm",
    "kv_up": "self_attn.kv_b_proj",
    "o": "self_attn.o_proj",
}


def deepseek(fields: Fields, name: str) -> Model:
    """Both versions: they differ in how they route, not in what a token meets."""
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
        names=_NAMES,
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
