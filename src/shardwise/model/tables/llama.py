"""Llama 1 to 4, and InternLM, which has the layers of Llama."""

from typing import Any


def _llama(
    hidden: int, layers: int, heads: int, width: int, *, kv_heads: int | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": width,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        **more,
    }


def _llama3(hidden: int, layers: int, heads: int, width: int, **more: Any) -> dict[str, Any]:
    long = {"vocab_size": 128256, "max_position_embeddings": 131072, **more}
    return _llama(hidden, layers, heads, width, kv_heads=8, **long)


def _llama4(experts: int, step: int, *, normed: bool, longest: int) -> dict[str, Any]:
    return {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": step,
        "attention_chunk_size": 8192,
        "use_qk_norm": normed,
        "vocab_size": 202048,
        "max_position_embeddings": longest,
    }


_SHORT = {"max_position_embeddings": 2048}
_OLD_LLAMA3 = {"max_position_embeddings": 8192}
_INTERN = {"vocab_size": 103168}

TABLE: dict[str, dict[str, Any]] = {
    "llama-7b": _llama(4096, 32, 32, 11008, **_SHORT),
    "llama-13b": _llama(5120, 40, 40, 13824, **_SHORT),
    "llama-30b": _llama(6656, 60, 52, 17920, **_SHORT),
    "llama-65b": _llama(8192, 80, 64, 22016, **_SHORT),
    "llama2-7b": _llama(4096, 32, 32, 11008),
    "llama2-13b": _llama(5120, 40, 40, 13824),
    "llama2-70b": _llama(8192, 80, 64, 28672, kv_heads=8),
    "llama3-8b": _llama3(4096, 32, 32, 14336, **_OLD_LLAMA3),
    "llama3-70b": _llama3(8192, 80, 64, 28672, **_OLD_LLAMA3),
    "llama3.1-8b": _llama3(4096, 32, 32, 14336),
    "llama3.1-70b": _llama3(8192, 80, 64, 28672),
    "llama3.1-405b": _llama3(16384, 126, 128, 53248),
    "llama3.2-1b": _llama3(2048, 16, 32, 8192, head_dim=64, tie_word_embeddings=True),
    "llama3.2-3b": _llama3(3072, 28, 24, 8192, head_dim=128, tie_word_embeddings=True),
    "llama3.3-70b": _llama3(8192, 80, 64, 28672),
    "llama4-scout-17b-16e": _llama4(16, 1, normed=True, longest=10485760),
    "llama4-maverick-17b-128e": _llama4(128, 2, normed=False, longest=1048576),
    "internlm-7b": _llama(4096, 32, 32, 11008, bias=True, **_INTERN),
    "internlm-20b": _llama(5120, 60, 40, 13824, **_INTERN),
}

ALIASES = {
    "llama1-7b": "llama-7b",
    "llama1-13b": "llama-13b",
    "llama1-30b": "llama-30b",
    "llama-33b": "llama-30b",
    "llama1-65b": "llama-65b",
    "llama3-405b": "llama3.1-405b",
    "llama4-scout": "llama4-scout-17b-16e",
    "llama4-maverick": "llama4-maverick-17b-128e",
}
