"""Llama, Mistral, Qwen2, Qwen3: gated, with RMS norms and rotary positions. They differ in biases, norms, windows."""

from typing import Any

from shardwise.nets.hf.entries import Entries
from shardwise.nets.hf.family import Family, of_kind
from shardwise.nets.hf.rope import read_rope, write_rope
from shardwise.nets.settings import Dropout, Heads, Latent, Mlp, Rope, Settings


def read_gated(
    entries: Entries,
    attention: Heads | Latent,
    *,
    mlp_bias: bool = False,
    theta: float = 10000.0,
    interleaved: bool = False,
    norm_epsilon: float = 1e-6,
    **more: Any,
) -> Settings:
    """Read what all gated families have in common, those with experts too. Dropout is of attention only."""
    entries.must_be("hidden_act", "silu")
    return Settings(
        vocabulary=entries.integer("vocab_size"),
        width=entries.integer("hidden_size"),
        num_layers=entries.integer("num_hidden_layers"),
        length=entries.integer("max_position_embeddings"),
        attention=attention,
        mlp=Mlp(width=entries.integer("intermediate_size"), bias=mlp_bias),
        rope=read_rope(entries, theta=theta, interleaved=interleaved),
        norm_epsilon=entries.number("rms_norm_eps", norm_epsilon),
        tied=entries.flag("tie_word_embeddings", False),
        dropout=Dropout(attention=entries.number("attention_dropout", 0.0)),
        **more,
    )


def write_gated(settings: Settings) -> dict[str, Any]:
    """Return the entries that the families share."""
    return {
        "vocab_size": settings.vocabulary,
        "hidden_size": settings.width,
        "num_hidden_layers": settings.num_layers,
        "max_position_embeddings": settings.length,
        "num_attention_heads": settings.attention.num_heads,
        "intermediate_size": settings.mlp.width,
        "hidden_act": settings.mlp.activation,
        "rms_norm_eps": settings.norm_epsilon,
        "tie_word_embeddings": settings.tied,
        "attention_dropout": settings.dropout.attention,
        **write_rope(of_kind(settings.rope, Rope)),
    }


def read_heads(entries: Entries, *, bias: bool = False, head_dim: int | None = None, **more: bool) -> Heads:
    """Read the settings of attention heads; `bias` applies to all four projections, `head_dim` if none is given."""
    num_heads = entries.integer("num_attention_heads")
    return Heads(
        num_heads=num_heads,
        num_kv_heads=entries.integer("num_key_value_heads", num_heads),
        head_dim=entries.integer("head_dim", head_dim or entries.integer("hidden_size") // num_heads),
        **{"qkv_bias": bias, "output_bias": bias, **more},
    )


def write_heads(settings: Settings) -> dict[str, Any]:
    """Return all entries of a family with attention heads, except its biases and windows."""
    heads = of_kind(settings.attention, Heads)
    return {**write_gated(settings), "num_key_value_heads": heads.num_kv_heads, "head_dim": heads.head_dim}


def write_bias(settings: Settings) -> dict[str, Any]:
    return {"attention_bias": of_kind(settings.attention, Heads).qkv_bias}


def read_bias(entries: Entries) -> bool:
    return entries.flag("attention_bias", False)


def find_window(entries: Entries, default: int | None = None) -> int | None:
    """Return the window of every layer; None if it is null, and a family's default if it is absent."""
    if entries.find("sliding_window") is None:
        return None if entries.has("sliding_window") else default
    return entries.integer("sliding_window")


def _windows(entries: Entries) -> dict[str, Any]:
    """Return Qwen's window, if it is used: in layers of that type, or from a layer on."""
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
    heads = read_heads(entries, bias=read_bias(entries))
    return read_gated(entries, heads, mlp_bias=entries.flag("mlp_bias", False))


def _read_qwen3(entries: Entries) -> Settings:
    heads = read_heads(entries, bias=read_bias(entries), head_dim=128, qk_norm=True)
    return read_gated(entries, heads, **_windows(entries))


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    read=_read_llama,
    write=lambda settings: {**write_heads(settings), **write_bias(settings), "mlp_bias": settings.mlp.bias},
)
MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    read=lambda entries: read_gated(entries, read_heads(entries), window=find_window(entries, 4096)),
    write=lambda settings: {**write_heads(settings), "sliding_window": settings.window},
)
QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    read=lambda entries: read_gated(entries, read_heads(entries, qkv_bias=True), **_windows(entries)),
    write=lambda settings: {**write_heads(settings), **_write_windows(settings)},
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read_qwen3,
    write=lambda settings: {**write_heads(settings), **_write_windows(settings), **write_bias(settings)},
)
