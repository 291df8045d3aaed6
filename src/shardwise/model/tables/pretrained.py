"""Falcon, BLOOM, OPT, MPT, GPT-NeoX and Pythia."""

from typing import Any


def _decoder(kind: str, hidden: int, layers: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        **more,
    }


def _falcon(hidden: int, layers: int, heads: int, vocabulary: int = 65024, **more: Any) -> dict[str, Any]:
    return _decoder("falcon", hidden, layers, heads, vocabulary, **more)


def _opt(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return _decoder("opt", hidden, layers, heads, 50272, ffn_dim=4 * hidden, **more)


def _neox(hidden: int, layers: int, heads: int, vocabulary: int = 50304) -> dict[str, Any]:
    return _decoder("gpt_neox", hidden, layers, heads, vocabulary, intermediate_size=4 * hidden)


def bloom(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Return a configuration with BLOOM's keys."""
    return {
        "model_type": "bloom",
        "hidden_size": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": 250880,
        "seq_length": 2048,
        **more,
    }


def _mpt(hidden: int, layers: int, heads: int, longest: int) -> dict[str, Any]:
    return {
        "model_type": "mpt",
        "d_model": hidden,
        "n_layers": layers,
        "n_heads": heads,
        "vocab_size": 50432,
        "max_seq_len": longest,
    }


_GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 8}
_NARROW = {"word_embed_proj_dim": 512, "do_layer_norm_before": False}

TABLE: dict[str, dict[str, Any]] = {
    "falcon-rw-1b": _falcon(2048, 24, 32, 50304, alibi=True, bias=True, multi_query=False, parallel_attn=False),
    "falcon-7b": _falcon(4544, 32, 71),
    "falcon-11b": _falcon(
        4096, 60, 32, num_ln_in_parallel_attn=1, tie_word_embeddings=False, max_position_embeddings=8192, **_GROUPED
    ),
    "falcon-40b": _falcon(8192, 60, 128, **_GROUPED),
    "falcon-180b": _falcon(14848, 80, 232, tie_word_embeddings=False, **_GROUPED),
    "bloom-560m": bloom(1024, 24, 16),
    "bloom-1b1": bloom(1536, 24, 16),
    "bloom-1b7": bloom(2048, 24, 16),
    "bloom-3b": bloom(2560, 30, 32),
    "bloom-7b1": bloom(4096, 30, 32),
    "bloom-176b": bloom(14336, 70, 112),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, **_NARROW),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "opt-175b": _opt(12288, 96, 96),
    "mpt-7b": _mpt(4096, 32, 32, 2048),
    "mpt-30b": _mpt(7168, 48, 64, 8192),
    "gpt-neox-20b": _neox(6144, 44, 64, 50432),
    "pythia-70m": _neox(512, 6, 8),
    "pythia-160m": _neox(768, 12, 12),
    "pythia-410m": _neox(1024, 24, 16),
    "pythia-1b": _neox(2048, 16, 8),
    "pythia-1.4b": _neox(2048, 24, 16),
    "pythia-2.8b": _neox(2560, 32, 32),
    "pythia-6.9b": _neox(4096, 32, 32, 50432),
    "pythia-12b": _neox(5120, 36, 40, 50688),
}

ALIASES = {"bloom": "bloom-176b"}
