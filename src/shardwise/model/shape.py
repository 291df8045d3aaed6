"""The shape of a transformer: sizes, and which of the known variations each layer has.

A catalogue entry, a `config.json` and a row of published figures all become shapes, and `assembly/transformer.py`
makes the `Model` of them. So there is one place that knows what a layer computes, whoever describes it.

    EmbeddingShape
    LayerShape ─ sublayers ─ Sublayer: norm, mixer, add
    ...                        mixer: attention | latent attention | mlp | experts | mamba
    HeadShape

`names` give the module's own names: `{"q": "self_attn.q_proj"}` makes a parameter `self_attn.q_proj.weight`. A
projection that the module keeps fused has one name: `qkv`, `gate_up`.
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

    `qk_norm` normalises queries and keys: `head` by head, with a weight of one head (`plain`: without a weight).
    `sinks` is a learned score of each head. `cross` reads keys and values from an encoder. `position_buckets` are the
    learned relative positions of T5. `transposed` weights are stored as inputs x outputs (GPT-2).
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

    `q_rank` of 0 makes queries straight from the input. A head's query and key have `nope_dim` + `rope_dim` elements,
    of which the rotated part of the key is one for all heads.
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
    """Up, nonlinearity, down; with a gate beside up if `gated`."""

    names: Mapping[str, str]
    width: int
    gated: bool = True
    bias: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """A mixture of experts: each token goes to `top_k` of `num_experts`, each an MLP of `width`.

    `shared` is an MLP that every token meets too, `shared_gate` weighs it by token. `latent` projects tokens down
    before they are sent and up again after (0: no). `transposed` weights are stored as inputs x outputs.
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
    """A mixer, and the norms by name: before it, on what it gives, or after the residual was added."""

    mixer: Mixer
    norm: str | None = None
    post_norm: str | None = None
    after_norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer. `parallel` sublayers read one input and are added up together (GPT-NeoX, Falcon, Phi)."""

    kind: str
    stack: str
    sublayers: tuple[Sublayer, ...]
    parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingShape:
    """Tables that are looked up and added: tokens, and by name further ones with their sizes (positions, token types).

    `width` is that of the tables if a projection `projection` follows (OPT 350m), else None.
    """

    tokens: str
    further: Mapping[str, int] = field(default_factory=dict)
    norm: str | None = None
    width: int | None = None
    projection: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Final norm, projection to the vocabulary, loss.

    `tied` heads use the token table. `bias` names a bias on the logits. `transform` is a dense layer and a norm
    before (BERT), by names. `projection` goes from the hidden width to that of the table (OPT 350m).
    """

    weight: str = "lm_head"
    norm: str | None = "model.norm"
    tied: bool = False
    bias: str | None = None
    transform: tuple[str, str] | None = None
    projection: str | None = None
