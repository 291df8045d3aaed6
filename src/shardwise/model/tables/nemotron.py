"""Nemotron 4, Minitron, and Nemotron 3 with its Mamba layers."""

from typing import Any

from shardwise.model.tables.llama import decoder


def _hybrid(hidden: int, pattern: str, mamba_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h",
        "hidden_size": hidden,
        "hybrid_override_pattern": pattern,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
        **more,
    }


TABLE: dict[str, dict[str, Any]] = {
    "minitron-4b": decoder("nemotron", 3072, 32, 24, 8, 9216, 256000, 4096, head_dim=128),
    "minitron-8b": decoder("nemotron", 4096, 32, 48, 8, 16384, 256000, 4096, head_dim=128),
    "nemotron-4-15b": decoder("nemotron", 6144, 32, 48, 8, 24576, 256000, 4096),
    "nemotron-4-340b": decoder("nemotron", 18432, 96, 96, 8, 73728, 256000, 4096),
    "nemotron-3-nano-30b-a3b": _hybrid(
        2688,
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
    ),
    "nemotron-3-super-120b-a12b": _hybrid(
        4096,
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        128,
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_intermediate_size=2688,
        moe_shared_expert_intermediate_size=5376,
        moe_latent_size=1024,
    ),
}

ALIASES = {
    "nemotron-3-nano": "nemotron-3-nano-30b-a3b",
    "nemotron-3-super": "nemotron-3-super-120b-a12b",
    "nemotron-v3-nano-30b": "nemotron-3-nano-30b-a3b",
    "nemotron-v3-super-120b": "nemotron-3-super-120b-a12b",
    "nemotron-15b": "nemotron-4-15b",
    "nemotron-340b": "nemotron-4-340b",
}
