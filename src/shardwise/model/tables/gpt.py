"""GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020, table 2.1) and GPT-OSS."""

from typing import Any

from shardwise.model.tables.llama import decoder


def gpt2(hidden: int, layers: int, heads: int, positions: int, **more: Any) -> dict[str, Any]:
    """Return a configuration with GPT-2's keys."""
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": 50257,
        **more,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    more = {"head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128}
    return decoder("gpt_oss", 2880, layers, 64, 8, 2880, 201088, 131072, **more)


# The paper gives GPT-3 XL 24 heads of 128 on a width of 2048, and 13B a width of 5140 for 40 heads of 128. Neither
# divides; everybody who built them took 16 heads, and 5120.
TABLE: dict[str, dict[str, Any]] = {
    "gpt2": gpt2(768, 12, 12, 1024),
    "gpt2-medium": gpt2(1024, 24, 16, 1024),
    "gpt2-large": gpt2(1280, 36, 20, 1024),
    "gpt2-xl": gpt2(1600, 48, 25, 1024),
    "gpt3-125m": gpt2(768, 12, 12, 2048),
    "gpt3-350m": gpt2(1024, 24, 16, 2048),
    "gpt3-760m": gpt2(1536, 24, 16, 2048),
    "gpt3-1.3b": gpt2(2048, 24, 16, 2048),
    "gpt3-2.7b": gpt2(2560, 32, 32, 2048),
    "gpt3-6.7b": gpt2(4096, 32, 32, 2048),
    "gpt3-13b": gpt2(5120, 40, 40, 2048),
    "gpt3-175b": gpt2(12288, 96, 96, 2048),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}

ALIASES = {"gpt2-small": "gpt2", "gpt3": "gpt3-175b"}
