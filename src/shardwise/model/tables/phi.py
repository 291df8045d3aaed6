"""Phi 1 to 4."""

from typing import Any


def _phi(hidden: int, layers: int, width: int) -> dict[str, Any]:
    return {
        "model_type": "phi",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "intermediate_size": width,
        "vocab_size": 51200,
        "max_position_embeddings": 2048,
    }


def _phi3(
    hidden: int, layers: int, heads: int, kv_heads: int, width: int, vocabulary: int, longest: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "phi3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
        **more,
    }


_BIASED = {"attention_bias": True, "lm_head_bias": True}

TABLE: dict[str, dict[str, Any]] = {
    "phi-1": _phi(2048, 24, 8192),
    "phi-1.5": _phi(2048, 24, 8192),
    "phi-2": _phi(2560, 32, 10240),
    "phi-3-mini": _phi3(3072, 32, 32, 32, 8192, 32064, 4096, sliding_window=2047),
    "phi-3-medium": _phi3(5120, 40, 40, 10, 17920, 32064, 4096, sliding_window=2047),
    "phi-3.5-moe": _phi3(
        4096,
        32,
        32,
        8,
        6400,
        32064,
        131072,
        model_type="phimoe",
        num_local_experts=16,
        num_experts_per_tok=2,
        **_BIASED,
    ),
    "phi-4": _phi3(5120, 40, 40, 10, 17920, 100352, 16384),
    "phi-4-mini": _phi3(3072, 32, 24, 8, 8192, 200064, 131072, tie_word_embeddings=True),
}

ALIASES = {"phi-3.5-mini": "phi-3-mini"}
