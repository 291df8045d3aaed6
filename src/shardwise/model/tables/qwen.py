"""Qwen 2, 2.5 and 3, dense and with experts."""

from typing import Any


def _qwen2(
    hidden: int, layers: int, heads: int, kv_heads: int, width: int, *, vocabulary: int = 152064, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        **more,
    }


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, width: int, **more: Any) -> dict[str, Any]:
    values = {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960, **more}
    return _qwen2(hidden, layers, heads, kv_heads, width, vocabulary=151936, **values)


def _experts(kind: str, count: int, top_k: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        **more,
    }


# The small ones use their table for both ends, and need no padding of it.
_SMALL: dict[str, Any] = {"vocabulary": 151936, "tie_word_embeddings": True}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}

TABLE: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": _qwen2(896, 24, 14, 2, 4864, **_SMALL),
    "qwen2-1.5b": _qwen2(1536, 28, 12, 2, 8960, **_SMALL),
    "qwen2-7b": _qwen2(3584, 28, 28, 4, 18944),
    "qwen2-72b": _qwen2(8192, 80, 64, 8, 29568),
    "qwen2-57b-a14b": _qwen2(
        3584,
        28,
        28,
        4,
        18944,
        vocabulary=151936,
        **_experts("qwen2_moe", 64, 8, 2560, shared_expert_intermediate_size=20480),
    ),
    "qwen1.5-moe-a2.7b": _qwen2(
        2048,
        24,
        16,
        16,
        5632,
        vocabulary=151936,
        **_experts("qwen2_moe", 60, 4, 1408, shared_expert_intermediate_size=5632),
    ),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, **_SMALL),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, **_SMALL),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11008, **_SMALL),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13824),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27648),
    "qwen2.5-72b": _qwen2(8192, 80, 64, 8, 29568),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, **_TIED),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, **_TIED),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, **_TIED),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 8, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 4, 6144, **_experts("qwen3_moe", 128, 8, 768)),
    "qwen3-235b-a22b": _qwen3(4096, 94, 64, 4, 12288, **_experts("qwen3_moe", 128, 8, 1536)),
    "qwen3-coder-480b-a35b": _qwen3(6144, 62, 96, 8, 8192, **_experts("qwen3_moe", 160, 8, 2560)),
}

ALIASES = {"qwen3-480b-a35b": "qwen3-coder-480b-a35b"}
