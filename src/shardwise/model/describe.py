"""A model from its sizes alone, as given in a table of published runs or in a sketch."""

from dataclasses import dataclass
from typing import Any, Literal

from shardwise.errors import ShardwiseError, unknown
from shardwise.model.config import read_config
from shardwise.model.model import Model
from shardwise.model.tables.gpt import gpt2
from shardwise.model.tables.llama import decoder
from shardwise.model.tables.pretrained import bloom

STYLES = ("gpt", "bloom", "llama")

# Llama's MLP has 2/3 of 4 times the hidden width, rounded up to a multiple of this.
_LLAMA_MULTIPLE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts instead of the MLP: `top_k` of `count` experts of `width`, and one shared expert."""

    count: int
    top_k: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model. A size that is None takes the style's default, such as an MLP of four times the width.

    `ffn` is the width of the MLP. `positions` is the longest sequence (learned positions have a vector for each).
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int | None = None
    ffn: int | None = None
    positions: int = 2048
    tied: bool | None = None
    dropout: bool = False
    experts: Experts | None = None


def describe(style: Literal["gpt", "bloom", "llama"], sizes: Sizes, *, name: str | None = None) -> Model:
    """Return the model with these sizes.

    `gpt`: layer norm, biases, GELU, learned positions, tied embeddings (Megatron's GPT, llm-foundry's MPT).
    `bloom`: the same with ALiBi slopes for positions and a norm after the embedding. `llama`: RMS norm, no biases,
    a gated MLP, rotary positions, an untied head. Only `llama` may have experts or fewer KV heads than query heads.
    """
    if style not in STYLES:
        raise unknown("style", style, STYLES)
    if style != "llama" and (sizes.experts or sizes.kv_heads not in (None, sizes.heads)):
        raise ShardwiseError(
            f"a model of style {style} has no experts, and as many keys as its {sizes.heads} heads",
            remedy='describe("llama", ...)',
        )
    makers = {"gpt": _gpt, "bloom": _bloom, "llama": _llama}
    return read_config(makers[style](sizes), name=name or f"{style}-{sizes.layers}x{sizes.hidden}")


def _gpt(sizes: Sizes) -> dict[str, Any]:
    rate = 0.1 if sizes.dropout else 0.0
    return {
        **gpt2(sizes.hidden, sizes.layers, sizes.heads, sizes.positions),
        "n_inner": sizes.ffn,
        "vocab_size": sizes.vocabulary,
        "tie_word_embeddings": sizes.tied,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), rate),
    }


def _bloom(sizes: Sizes) -> dict[str, Any]:
    if sizes.ffn not in (None, 4 * sizes.hidden):
        raise ShardwiseError(
            f"a model of style bloom has an MLP of 4 x {sizes.hidden}, not of {sizes.ffn}",
            remedy='describe("gpt", ...)',
        )
    return {
        **bloom(sizes.hidden, sizes.layers, sizes.heads),
        "vocab_size": sizes.vocabulary,
        "seq_length": sizes.positions,
        "tie_word_embeddings": sizes.tied,
        "hidden_dropout": 0.1 if sizes.dropout else 0.0,
    }


def _llama(sizes: Sizes) -> dict[str, Any]:
    width = sizes.ffn or -(-8 * sizes.hidden // 3 // _LLAMA_MULTIPLE) * _LLAMA_MULTIPLE
    kv_heads, rest = sizes.kv_heads or sizes.heads, (width, sizes.vocabulary, sizes.positions)
    values = {
        **decoder("llama", sizes.hidden, sizes.layers, sizes.heads, kv_heads, *rest),
        "tie_word_embeddings": sizes.tied,
        "hidden_dropout": 0.1 if sizes.dropout else 0.0,
    }
    if sizes.experts is None:
        return values
    return {
        **values,
        "model_type": "qwen2_moe",
        "qkv_bias": False,
        "num_experts": sizes.experts.count,
        "num_experts_per_tok": sizes.experts.top_k,
        "moe_intermediate_size": sizes.experts.width,
        "shared_expert_intermediate_size": sizes.experts.shared_width,
    }
