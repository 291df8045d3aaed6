"""GPT-2: learned positions, layer norms, biases, and no gate."""

from collections.abc import Collection
from typing import Any

from shardwise.errors import unknown
from shardwise.nets.hf.entries import Entries
from shardwise.nets.hf.family import Family, of_kind
from shardwise.nets.hf.naming import GPT2 as GPT2_NAMES
from shardwise.nets.hf.naming import Naming
from shardwise.nets.settings import Activation, Dropout, Heads, Mlp, Settings

_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
}


def _read(entries: Entries) -> Settings:
    for key in ("add_cross_attention", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        entries.must_be(key, False)
    entries.must_be("scale_attn_weights", True)
    activation = entries.text("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise unknown("activation_function", activation, _ACTIVATIONS)
    width, num_heads = _size(entries, "n_embd", "hidden_size"), _size(entries, "n_head", "num_attention_heads")
    return Settings(
        vocabulary=entries.integer("vocab_size"),
        width=width,
        num_layers=_size(entries, "n_layer", "num_hidden_layers"),
        length=_size(entries, "n_positions", "max_position_embeddings"),
        attention=Heads(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=width // num_heads,
            qkv_bias=True,
            output_bias=True,
        ),
        mlp=Mlp(
            width=entries.integer("n_inner", 4 * width), activation=_ACTIVATIONS[activation], gated=False, bias=True
        ),
        rope=None,
        norm="layer",
        norm_epsilon=entries.number("layer_norm_epsilon", 1e-5),
        tied=entries.flag("tie_word_embeddings", True),
        dropout=Dropout(
            embedding=entries.number("embd_pdrop", 0.0),
            attention=entries.number("attn_pdrop", 0.0),
            residual=entries.number("resid_pdrop", 0.0),
        ),
    )


def _size(entries: Entries, name: str, other: str) -> int:
    """Return a size by either of its names, which must not contradict each other."""
    size = entries.integer(name, entries.find(other))
    entries.must_be(other, size)
    return size


def _write(settings: Settings) -> dict[str, Any]:
    return {
        "vocab_size": settings.vocabulary,
        "n_embd": settings.width,
        "n_layer": settings.num_layers,
        "n_positions": settings.length,
        "n_head": of_kind(settings.attention, Heads).num_heads,
        "n_inner": settings.mlp.width,
        "activation_function": next(word for word, ours in _ACTIVATIONS.items() if ours == settings.mlp.activation),
        "layer_norm_epsilon": settings.norm_epsilon,
        "tie_word_embeddings": settings.tied,
        "embd_pdrop": settings.dropout.embedding,
        "attn_pdrop": settings.dropout.attention,
        "resid_pdrop": settings.dropout.residual,
    }


def _naming(names: Collection[str]) -> Naming:
    """Return the naming. OpenAI's original folders have no prefix."""
    has_prefix = not names or any(name.startswith("transformer.") for name in names)
    return Naming(parts=GPT2_NAMES, prefix="transformer." if has_prefix else "", is_gpt2=True)


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    read=_read,
    write=_write,
    naming=_naming,
    ignored=r"\.attn\.(masked_)?bias$",
)
