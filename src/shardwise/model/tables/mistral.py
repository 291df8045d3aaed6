"""Mistral and Mixtral."""

from typing import Any


def _mistral(
    hidden: int, layers: int, heads: int, width: int, vocabulary: int, *, longest: int = 32768, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "mistral",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": width,
        "sliding_window": None,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
        **more,
    }


_EXPERTS: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}

TABLE: dict[str, dict[str, Any]] = {
    "mistral-7b-v0.1": _mistral(4096, 32, 32, 14336, 32000, sliding_window=4096),
    "mistral-7b-v0.3": _mistral(4096, 32, 32, 14336, 32768),
    "mistral-nemo-12b": _mistral(5120, 40, 32, 14336, 131072, longest=131072),
    "mistral-small-22b": _mistral(6144, 56, 48, 16384, 32768, longest=131072),
    "mistral-small-24b": _mistral(5120, 40, 32, 32768, 131072),
    "mistral-large-123b": _mistral(12288, 88, 96, 28672, 32768, longest=131072),
    "mixtral-8x7b": _mistral(4096, 32, 32, 14336, 32000, **_EXPERTS),
    "mixtral-8x22b": _mistral(6144, 56, 48, 16384, 32000, longest=65536, **_EXPERTS),
}

ALIASES = {
    "mistral-7b": "mistral-7b-v0.3",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small": "mistral-small-24b",
    "mistral-large": "mistral-large-123b",
    "codestral-22b": "mistral-small-22b",
}
