"""The shape of a transformer: its sizes, and the variant of each layer.

A catalogue entry, a `config.json` and a row of published figures all become shapes. `assembly/transformer.py` makes
the `Model` from these. So only one place defines what a layer computes, whatever the source of the description.

    EmbeddingShape
    LayerShape ─ sublayers ─ Sublayer: norm, mixer, add
    ...                        mixer: attention | latent attention | mlp | experts | mamba
    HeadShape

`names` maps to the module's own names: `{"q": "self_attn.q_proj"}` makes a parameter `self_attn.q_proj.weight`. A
projection that is fused in the module has one name: `qkv`, `gate_up`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class NormShape:
    """How a model normalises: root mean square or layer norm, with a bias or not."""

    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention with `heads` queries over `kv_heads` keys and values.

    `qk_norm` normalises queries and keys: `head` for each head, with a weight of one head's size; `plain` without a
    weight. `sinks` adds a learned score to each head. `cross` takes keys and values from an encoder.
    `position_buckets` are T5's learned relative positions. `transposed` weights are inputs x outputs (GPT-2).
    """

    names: Mapping[str, str]
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    rotary: bool = True
    qk_norm: Literal["none", "head", "plain"] = "none"
    dropout: bool = False
    sinks: bool = False
    cross: bool = False
    position_buckets: int = 0
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek V2): queries, keys and values from low-rank latents.

    With a `q_rank` of 0, queries are projected directly from the input. A head's query and key have `nope_dim` +
    `rope_dim` elements; all heads share the rotated part of the key.
    """

    names: Mapping[str, str]
    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpShape:
    """Up projection, nonlinearity, down projection; with a gate projection if `gated`."""

    names: Mapping[str, str]
    width: int
    gated: bool = True
    bias: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """A mixture of experts: each token goes to `top_k` of `num_experts`, each an MLP of `width`.

    `shared` is an MLP that every token also passes; `shared_gate` weighs its output by token. `latent` is the width to
    which tokens are projected while they are sent (0: no projection). `transposed` weights are inputs x outputs.
    """

    names: Mapping[str, str]
    num_experts: int
    top_k: int
    width: int
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    shared: MlpShape | None = None
    shared_gate: bool = False
    latent: int = 0
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape:
    """A Mamba 2 mixer: `heads` of `head_dim`, `groups` that share the two projections of the state."""

    names: Mapping[str, str]
    heads: int
    head_dim: int
    groups: int
    state: int
    convolution: int = 4
    convolution_bias: bool = True
    chunk: int = 128
    bias: bool = False


Mixer: TypeAlias = AttentionShape | LatentShape | MlpShape | ExpertsShape | MambaShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    """A mixer, and the names of its norms: before it, on its output, or after the residual addition."""

    mixer: Mixer
    norm: str | None = None
    post_norm: str | None = None
    after_norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer. `parallel` sublayers read the same input and their outputs are summed (GPT-NeoX, Falcon, Phi)."""

    kind: str
    stack: str
    sublayers: tuple[Sublayer, ...]
    parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingShape:
    """Embedding tables whose rows are summed: tokens, and `further` ones by name and size (positions, token types).

    `width` is the width of the tables if `projection` names a projection that follows (OPT 350m), else None.
    """

    tokens: str
    further: Mapping[str, int] = field(default_factory=dict)
    norm: str | None = None
    width: int | None = None
    projection: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Final norm, projection to the vocabulary, loss.

    `tied` heads use the token table. `bias` names a bias of the logits. `transform` names a dense layer and a norm
    before the projection (BERT). `projection` maps the hidden width to the table's width (OPT 350m).
    """

    weight: str = "lm_head"
    norm: str | None = "model.norm"
    tied: bool = False
    bias: str | None = None
    transform: tuple[str, str] | None = None
    projection: str | None = None
