"""Llama, Mistral, Qwen2, Qwen3: gated, with RMS norms and rotary positions. They differ in biases, norms, windows."""

from collections.abc import Collection
from typing import Any

from shardwise.nets.hf.entries import Entries
from shardwise.nets.hf.family import Family
from shardwise.nets.hf.naming import LLAMA as LLAMA_NAMES
from shardwise.nets.hf.naming import Naming
from shardwise.nets.hf.rope import read_rope, write_rope
from shardwise.nets.settings import Dropout, Heads, Mixture, Mlp, Settings


def read_gated(
    entries: Entries,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
    windowed_layers: tuple[int, ...] | None = None,
    mixture: Mixture | None = None,
    theta: float = 10000.0,
    norm_epsilon: float = 1e-6,
) -> Settings:
    """What the families have in common. The rest is given."""
    entries.must_be("hidden_act", "silu")
    width, num_heads = entries.integer("hidden_size"), entries.integer("num_attention_heads")
    return Settings(
        vocabulary=entries.integer("vocab_size"),
        width=width,
        num_layers=entries.integer("num_hidden_layers"),
        length=entries.integer("max_position_embeddings"),
        attention=Heads(
            num_heads=num_heads,
            num_kv_heads=entries.integer("num_key_value_heads", num_heads),
            head_dim=entries.integer("head_dim", width // num_heads),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
        ),
        mlp=Mlp(width=entries.integer("intermediate_size"), bias=mlp_bias),
        mixture=mixture,
        rope=read_rope(entries, theta=theta),
        norm_epsilon=entries.number("rms_norm_eps", norm_epsilon),
        window=window,
        windowed_layers=windowed_layers,
        tied=entries.flag("tie_word_embeddings", False),
        dropout=read_dropout(entries),
    )


def write_gated(settings: Settings) -> dict[str, Any] | None:
    """The entries that the families share."""
    heads = settings.attention
    if not isinstance(heads, Heads) or settings.rope is None:
        return None
    return {
        "vocab_size": settings.vocabulary,
        "hidden_size": settings.width,
        "num_hidden_layers": settings.num_layers,
        "max_position_embeddings": settings.length,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "intermediate_size": settings.mlp.width,
        "hidden_act": settings.mlp.activation,
        "rms_norm_eps": settings.norm_epsilon,
        "tie_word_embeddings": settings.tied,
        **write_dropout(settings),
        **write_rope(settings.rope),
    }


def read_dropout(entries: Entries) -> Dropout:
    """Of weights of attention alone; other dropout these families do not have."""
    return Dropout(attention=entries.number("attention_dropout", 0.0))


def write_dropout(settings: Settings) -> dict[str, Any]:
    return {"attention_dropout": settings.dropout.attention}


def find_window(entries: Entries) -> int | None:
    """Mistral's: a window in every layer, unless it is null."""
    return None if entries.find("sliding_window") is None else entries.integer("sliding_window")


def _windows(entries: Entries) -> dict[str, Any]:
    """Qwen's: a window only if it is used, in layers of that type or from a layer on."""
    if not entries.flag("use_sliding_window", False):
        return {}
    num_layers, types = entries.integer("num_hidden_layers"), entries.find("layer_types")
    if types is None:
        layers = tuple(range(entries.integer("max_window_layers", 28), num_layers))
    else:
        layers = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    return {"window": entries.integer("sliding_window", 4096), "windowed_layers": layers} if layers else {}


def _write_windows(settings: Settings) -> dict[str, Any]:
    if settings.window is None:
        return {"use_sliding_window": False}
    kinds = ("full_attention", "sliding_attention")
    types = [kinds[settings.is_windowed(layer)] for layer in range(settings.num_layers)]
    return {"use_sliding_window": True, "sliding_window": settings.window, "layer_types": types}


def _read_llama(entries: Entries) -> Settings:
    bias = entries.flag("attention_bias", False)
    return read_gated(entries, qkv_bias=bias, output_bias=bias, mlp_bias=entries.flag("mlp_bias", False))


def _write_llama(settings: Settings) -> dict[str, Any] | None:
    config = write_gated(settings)
    biases = {"attention_bias": has_qkv_bias(settings), "mlp_bias": settings.mlp.bias}
    return None if config is None else {**config, **biases}


def _read_mistral(entries: Entries) -> Settings:
    return read_gated(entries, window=find_window(entries))


def _write_mistral(settings: Settings) -> dict[str, Any] | None:
    config = write_gated(settings)
    return None if config is None else {**config, "sliding_window": settings.window}


def _read_qwen2(entries: Entries) -> Settings:
    return read_gated(entries, qkv_bias=True, **_windows(entries))


def _write_qwen2(settings: Settings) -> dict[str, Any] | None:
    config = write_gated(settings)
    return None if config is None else {**config, **_write_windows(settings)}


def _read_qwen3(entries: Entries) -> Settings:
    bias = entries.flag("attention_bias", False)
    return read_gated(entries, qkv_bias=bias, output_bias=bias, qk_norm=True, **_windows(entries))


def _write_qwen3(settings: Settings) -> dict[str, Any] | None:
    config = _write_qwen2(settings)
    return None if config is None else {**config, "attention_bias": has_qkv_bias(settings)}


def has_qkv_bias(settings: Settings) -> bool:
    return isinstance(settings.attention, Heads) and settings.attention.qkv_bias


def _naming(names: Collection[str]) -> Naming:
    del names
    return Naming(parts=LLAMA_NAMES)


LLAMA = Family(name="llama", architecture="LlamaForCausalLM", read=_read_llama, write=_write_llama, naming=_naming)
MISTRAL = Family(
    name="mistral", architecture="MistralForCausalLM", read=_read_mistral, write=_write_mistral, naming=_naming
)
QWEN2 = Family(name="qwen2", architecture="Qwen2ForCausalLM", read=_read_qwen2, write=_write_qwen2, naming=_naming)
QWEN3 = Family(name="qwen3", architecture="Qwen3ForCausalLM", read=_read_qwen3, write=_write_qwen3, naming=_naming)
