"""Gemma 1 to 3. Of Gemma 3 from 4B on, the part that reads."""

from typing import Any


def _gemma(
    kind: str, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, width: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": width,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        **more,
    }


_SECOND = {"sliding_window": 4096}
_THIRD = {"sliding_window": 1024, "vocab_size": 262208, "max_position_embeddings": 131072}
_THIRD_SMALL = {"sliding_window": 512, "vocab_size": 262144, "max_position_embeddings": 32768}

TABLE: dict[str, dict[str, Any]] = {
    "gemma-2b": _gemma("gemma", 2048, 18, 8, 1, 256, 16384),
    "gemma-7b": _gemma("gemma", 3072, 28, 16, 16, 256, 24576),
    "gemma2-2b": _gemma("gemma2", 2304, 26, 8, 4, 256, 9216, **_SECOND),
    "gemma2-9b": _gemma("gemma2", 3584, 42, 16, 8, 256, 14336, **_SECOND),
    "gemma2-27b": _gemma("gemma2", 4608, 46, 32, 16, 128, 36864, **_SECOND),
    "gemma3-1b": _gemma("gemma3_text", 1152, 26, 4, 1, 256, 6912, **_THIRD_SMALL),
    "gemma3-4b": _gemma("gemma3_text", 2560, 34, 8, 4, 256, 10240, **_THIRD),
    "gemma3-12b": _gemma("gemma3_text", 3840, 48, 16, 8, 256, 15360, **_THIRD),
    "gemma3-27b": _gemma("gemma3_text", 5376, 62, 32, 16, 128, 21504, **_THIRD),
}

ALIASES: dict[str, str] = {}
