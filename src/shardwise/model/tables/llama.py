"""Decoders after Llama: Llama, InternLM, Mistral, Qwen, Gemma (from Gemma 3 4B on its language model) and Phi."""

from typing import Any


def decoder(
    kind: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    width: int,
    vocabulary: int,
    longest: int,
    **more: Any,
) -> dict[str, Any]:
    """Return a configuration with Llama's keys; `width` is that of the MLP, `longest` the most positions."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
        **more,
    }


def _experts(count: int, top_k: int, width: int, **more: Any) -> dict[str, Any]:
    """Return the experts of Qwen's mixtures."""
    return {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": width, **more}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_LLAMA4: dict[str, Any] = {
    "head_dim": 128,
    "intermediate_size_mlp": 16384,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
}
_MISTRAL: dict[str, Any] = {"head_dim": 128, "sliding_window": None}
_MIXTRAL: dict[str, Any] = {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN3: dict[str, Any] = {"head_dim": 128}
_GEMMA: dict[str, Any] = {"head_dim": 256, **_TIED}
_GEMMA2: dict[str, Any] = {**_GEMMA, "sliding_window": 4096}
_GEMMA3: dict[str, Any] = {**_GEMMA, "sliding_window": 1024}
_PHI_MOE = {"num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True}

# Width, layers, heads, heads of keys and values, width of the MLP, vocabulary, longest sequence.
TABLE: dict[str, dict[str, Any]] = {
    "llama-7b": decoder("llama", 4096, 32, 32, 32, 11008, 32000, 2048),
    "llama-13b": decoder("llama", 5120, 40, 40, 40, 13824, 32000, 2048),
    "llama-30b": decoder("llama", 6656, 60, 52, 52, 17920, 32000, 2048),
    "llama-65b": decoder("llama", 8192, 80, 64, 64, 22016, 32000, 2048),
    "llama2-7b": decoder("llama", 4096, 32, 32, 32, 11008, 32000, 4096),
    "llama2-13b": decoder("llama", 5120, 40, 40, 40, 13824, 32000, 4096),
    "llama2-70b": decoder("llama", 8192, 80, 64, 8, 28672, 32000, 4096),
    "llama3-8b": decoder("llama", 4096, 32, 32, 8, 14336, 128256, 8192),
    "llama3-70b": decoder("llama", 8192, 80, 64, 8, 28672, 128256, 8192),
    "llama3.1-8b": decoder("llama", 4096, 32, 32, 8, 14336, 128256, 131072),
    "llama3.1-70b": decoder("llama", 8192, 80, 64, 8, 28672, 128256, 131072),
    "llama3.1-405b": decoder("llama", 16384, 126, 128, 8, 53248, 128256, 131072),
    "llama3.2-1b": decoder("llama", 2048, 16, 32, 8, 8192, 128256, 131072, head_dim=64, **_TIED),
    "llama3.2-3b": decoder("llama", 3072, 28, 24, 8, 8192, 128256, 131072, head_dim=128, **_TIED),
    "llama3.3-70b": decoder("llama", 8192, 80, 64, 8, 28672, 128256, 131072),
    "llama4-scout-17b-16e": decoder("llama4_text", 5120, 48, 40, 8, 8192, 202048, 10485760, **_LLAMA4)
    | {"num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True},
    "llama4-maverick-17b-128e": decoder("llama4_text", 5120, 48, 40, 8, 8192, 202048, 1048576, **_LLAMA4)
    | {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
    "internlm-7b": decoder("llama", 4096, 32, 32, 32, 11008, 103168, 4096, bias=True),
    "internlm-20b": decoder("llama", 5120, 60, 40, 40, 13824, 103168, 4096),
    "mistral-7b-v0.1": decoder("mistral", 4096, 32, 32, 8, 14336, 32000, 32768, head_dim=128, sliding_window=4096),
    "mistral-7b-v0.3": decoder("mistral", 4096, 32, 32, 8, 14336, 32768, 32768, **_MISTRAL),
    "mistral-nemo-12b": decoder("mistral", 5120, 40, 32, 8, 14336, 131072, 131072, **_MISTRAL),
    "mistral-small-22b": decoder("mistral", 6144, 56, 48, 8, 16384, 32768, 131072, **_MISTRAL),
    "mistral-small-24b": decoder("mistral", 5120, 40, 32, 8, 32768, 131072, 32768, **_MISTRAL),
    "mistral-large-123b": decoder("mistral", 12288, 88, 96, 8, 28672, 32768, 131072, **_MISTRAL),
    "mixtral-8x7b": decoder("mixtral", 4096, 32, 32, 8, 14336, 32000, 32768, **_MIXTRAL),
    "mixtral-8x22b": decoder("mixtral", 6144, 56, 48, 8, 16384, 32000, 65536, **_MIXTRAL),
    "qwen2-0.5b": decoder("qwen2", 896, 24, 14, 2, 4864, 151936, 32768, **_TIED),
    "qwen2-1.5b": decoder("qwen2", 1536, 28, 12, 2, 8960, 151936, 32768, **_TIED),
    "qwen2-7b": decoder("qwen2", 3584, 28, 28, 4, 18944, 152064, 32768),
    "qwen2-72b": decoder("qwen2", 8192, 80, 64, 8, 29568, 152064, 32768),
    "qwen2-57b-a14b": decoder("qwen2_moe", 3584, 28, 28, 4, 18944, 151936, 32768)
    | _experts(64, 8, 2560, shared_expert_intermediate_size=20480),
    "qwen1.5-moe-a2.7b": decoder("qwen2_moe", 2048, 24, 16, 16, 5632, 151936, 32768)
    | _experts(60, 4, 1408, shared_expert_intermediate_size=5632),
    "qwen2.5-0.5b": decoder("qwen2", 896, 24, 14, 2, 4864, 151936, 32768, **_TIED),
    "qwen2.5-1.5b": decoder("qwen2", 1536, 28, 12, 2, 8960, 151936, 32768, **_TIED),
    "qwen2.5-3b": decoder("qwen2", 2048, 36, 16, 2, 11008, 151936, 32768, **_TIED),
    "qwen2.5-7b": decoder("qwen2", 3584, 28, 28, 4, 18944, 152064, 32768),
    "qwen2.5-14b": decoder("qwen2", 5120, 48, 40, 8, 13824, 152064, 32768),
    "qwen2.5-32b": decoder("qwen2", 5120, 64, 40, 8, 27648, 152064, 32768),
    "qwen2.5-72b": decoder("qwen2", 8192, 80, 64, 8, 29568, 152064, 32768),
    "qwen3-0.6b": decoder("qwen3", 1024, 28, 16, 8, 3072, 151936, 40960, **_QWEN3, **_TIED),
    "qwen3-1.7b": decoder("qwen3", 2048, 28, 16, 8, 6144, 151936, 40960, **_QWEN3, **_TIED),
    "qwen3-4b": decoder("qwen3", 2560, 36, 32, 8, 9728, 151936, 40960, **_QWEN3, **_TIED),
    "qwen3-8b": decoder("qwen3", 4096, 36, 32, 8, 12288, 151936, 40960, **_QWEN3),
    "qwen3-14b": decoder("qwen3", 5120, 40, 40, 8, 17408, 151936, 40960, **_QWEN3),
    "qwen3-32b": decoder("qwen3", 5120, 64, 64, 8, 25600, 151936, 40960, **_QWEN3),
    "qwen3-30b-a3b": decoder("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, 40960, **_QWEN3) | _experts(128, 8, 768),
    "qwen3-235b-a22b": decoder("qwen3_moe", 4096, 94, 64, 4, 12288, 151936, 40960, **_QWEN3) | _experts(128, 8, 1536),
    "qwen3-coder-480b-a35b": decoder("qwen3_moe", 6144, 62, 96, 8, 8192, 151936, 40960, **_QWEN3)
    | _experts(160, 8, 2560),
    "gemma-2b": decoder("gemma", 2048, 18, 8, 1, 16384, 256000, 8192, **_GEMMA),
    "gemma-7b": decoder("gemma", 3072, 28, 16, 16, 24576, 256000, 8192, **_GEMMA),
    "gemma2-2b": decoder("gemma2", 2304, 26, 8, 4, 9216, 256000, 8192, **_GEMMA2),
    "gemma2-9b": decoder("gemma2", 3584, 42, 16, 8, 14336, 256000, 8192, **_GEMMA2),
    "gemma2-27b": decoder("gemma2", 4608, 46, 32, 16, 36864, 256000, 8192, **_GEMMA2) | {"head_dim": 128},
    "gemma3-1b": decoder("gemma3_text", 1152, 26, 4, 1, 6912, 262144, 32768, **_GEMMA) | {"sliding_window": 512},
    "gemma3-4b": decoder("gemma3_text", 2560, 34, 8, 4, 10240, 262208, 131072, **_GEMMA3),
    "gemma3-12b": decoder("gemma3_text", 3840, 48, 16, 8, 15360, 262208, 131072, **_GEMMA3),
    "gemma3-27b": decoder("gemma3_text", 5376, 62, 32, 16, 21504, 262208, 131072, **_GEMMA3) | {"head_dim": 128},
    "phi-1": decoder("phi", 2048, 24, 32, 32, 8192, 51200, 2048),
    "phi-1.5": decoder("phi", 2048, 24, 32, 32, 8192, 51200, 2048),
    "phi-2": decoder("phi", 2560, 32, 32, 32, 10240, 51200, 2048),
    "phi-3-mini": decoder("phi3", 3072, 32, 32, 32, 8192, 32064, 4096, sliding_window=2047),
    "phi-3-medium": decoder("phi3", 5120, 40, 40, 10, 17920, 32064, 4096, sliding_window=2047),
    "phi-3.5-moe": decoder("phimoe", 4096, 32, 32, 8, 6400, 32064, 131072, **_PHI_MOE),
    "phi-4": decoder("phi3", 5120, 40, 40, 10, 17920, 100352, 16384),
    "phi-4-mini": decoder("phi3", 3072, 32, 24, 8, 8192, 200064, 131072, **_TIED),
}

ALIASES = {
    "qwen3-moe-30b": "qwen3-30b-a3b",
    "llama1-7b": "llama-7b",
    "llama1-13b": "llama-13b",
    "llama1-30b": "llama-30b",
    "llama-33b": "llama-30b",
    "llama1-65b": "llama-65b",
    "llama3-405b": "llama3.1-405b",
    "llama4-scout": "llama4-scout-17b-16e",
    "llama4-maverick": "llama4-maverick-17b-128e",
    "mistral-7b": "mistral-7b-v0.3",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small": "mistral-small-24b",
    "mistral-large": "mistral-large-123b",
    "codestral-22b": "mistral-small-22b",
    "qwen3-480b-a35b": "qwen3-coder-480b-a35b",
    "phi-3.5-mini": "phi-3-mini",
}
