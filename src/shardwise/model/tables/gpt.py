"""GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020, table 2.1) and GPT-OSS."""

from typing import Any


def _gpt(hidden: int, layers: int, heads: int, positions: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": 50257,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
    }


# The paper gives GPT-3 XL 24 heads of 128 on a width of 2048, and 13B a width of 5140 for 40 heads of 128. Neither
# divides; everybody who built them took 16 heads, and 5120.
TABLE: dict[str, dict[str, Any]] = {
    "gpt2": _gpt(768, 12, 12, 1024),
    "gpt2-medium": _gpt(1024, 24, 16, 1024),
    "gpt2-large": _gpt(1280, 36, 20, 1024),
    "gpt2-xl": _gpt(1600, 48, 25, 1024),
    "gpt3-125m": _gpt(768, 12, 12, 2048),
    "gpt3-350m": _gpt(1024, 24, 16, 2048),
    "gpt3-760m": _gpt(1536, 24, 16, 2048),
    "gpt3-1.3b": _gpt(2048, 24, 16, 2048),
    "gpt3-2.7b": _gpt(2560, 32, 32, 2048),
    "gpt3-6.7b": _gpt(4096, 32, 32, 2048),
    "gpt3-13b": _gpt(5120, 40, 40, 2048),
    "gpt3-175b": _gpt(12288, 96, 96, 2048),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}

ALIASES = {"gpt2-small": "gpt2", "gpt3": "gpt3-175b"}
