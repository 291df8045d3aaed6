"""DeepSeek V2 and V3, and Moonlight, which has the layers of V3."""

from typing import Any

from shardwise.model.tables.llama import decoder


def _latent(
    hidden: int, layers: int, heads: int, width: int, vocabulary: int, q_rank: int | None = 1536, **more: Any
) -> dict[str, Any]:
    return {
        **decoder("deepseek_v2", hidden, layers, heads, heads, width, vocabulary, 163840),
        "q_lora_rank": q_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        **more,
    }


def _experts(count: int, top_k: int, width: int, shared: int) -> dict[str, Any]:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
    }


_V3: dict[str, Any] = {"model_type": "deepseek_v3"}

TABLE: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": _latent(2048, 27, 16, 10944, 102400, None, **_experts(64, 6, 1408, 2)),
    "deepseek-v2": _latent(5120, 60, 128, 12288, 102400, **_experts(160, 6, 1536, 2)),
    "deepseek-v3": _latent(7168, 61, 128, 18432, 129280, **_experts(256, 8, 2048, 1), **_V3)
    | {"first_k_dense_replace": 3},
    "moonlight-16b-a3b": _latent(2048, 27, 16, 11264, 163840, None, **_experts(64, 6, 1408, 2), **_V3)
    | {"max_position_embeddings": 8192},
    # As moonshotai's config.json has it (read in public copies of it): one dense layer, 384 experts of which 8.
    "kimi-k2": _latent(7168, 61, 64, 18432, 163840, **_experts(384, 8, 2048, 1), **_V3),
}

ALIASES = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v2.5": "deepseek-v2",
    "deepseek-v3-671b": "deepseek-v3",
    "moonlight-16b": "moonlight-16b-a3b",
    "kimi-k2-1t": "kimi-k2",
}
