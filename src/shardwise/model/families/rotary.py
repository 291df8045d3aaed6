"""What decoders with rotary positions and the names of Llama have together."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardwise.model.assembly.transformer import transformer
from shardwise.model.families.fields import Fields
from shardwise.model.model import Model
from shardwise.model.shape import (
    AttentionShape,
    EmbeddingShape,
    ExpertsShape,
    HeadShape,
    LatentShape,
    LayerShape,
    MlpShape,
    NormShape,
    Sublayer,
)

STACK = "model.layers"
ATTENTION = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "sinks": "self_attn.sinks",
}
MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
EXPERTS = {"router": "mlp.gate", "expert_up": "mlp.experts.gate_up_proj", "expert_down": "mlp.experts.down_proj"}

Attend = Callable[[int], tuple[str, AttentionShape | LatentShape]]
Feed = Callable[[int], tuple[str, MlpShape | ExpertsShape]]


def decoder(
    fields: Fields,
    name: str,
    *,
    attend: Attend,
    feed: Feed | None = None,
    norm: NormShape | None = None,
    tied: bool = False,
    post_norms: bool = False,
    head_bias: str | None = None,
) -> Model:
    """Return the model of layers that are made one by one.

    `attend` and `feed` give the mixers of a layer and a word on what is special about each; the words make its kind.
    Without `feed` all have the gated MLP. `post_norms` are those of Gemma 2: also on what a sublayer gives.
    """
    feed = feed or fed_by(mlp_of(fields))
    layers = []
    for index in range(fields.count("num_hidden_layers")):
        (how, mixer), (what, fed) = attend(index), feed(index)
        kind = " ".join(filter(None, (how, what))) or "layer"
        layers.append(LayerShape(kind=kind, stack=STACK, sublayers=_sublayers(mixer, fed, post_norms=post_norms)))
    head = HeadShape(tied=fields.flag("tie_word_embeddings", tied), bias=head_bias)
    return transformer(
        name,
        fields.text("model_type", "llama"),
        fields.count("hidden_size"),
        fields.count("vocab_size"),
        layers=tuple(layers),
        ends=(EmbeddingShape(tokens="model.embed_tokens"), head),
        norms=norm,
        dropout=fields.drops("hidden_dropout", "resid_pdrop"),
        max_sequence=fields.find_count("max_position_embeddings"),
    )


def attention_of(fields: Fields, *, qkv_bias: bool = False, out_bias: bool = False) -> AttentionShape:
    """Return the attention that most of these families have."""
    hidden = fields.count("hidden_size")
    heads = fields.heads(hidden)
    return AttentionShape(
        names=ATTENTION,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", default=heads),
        head_dim=fields.count("head_dim", default=hidden // heads),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        dropout=fields.drops("attention_dropout"),
    )


def mlp_of(fields: Fields, *, width: int | None = None, names: Mapping[str, str] = MLP, gated: bool = True) -> MlpShape:
    """Return the gated MLP that most of these families have."""
    width = width or fields.count("intermediate_size")
    return MlpShape(names=names, width=width, gated=gated, bias=fields.flag("mlp_bias"))


def sliding(fields: Fields, shape: AttentionShape, slides: Callable[[int], bool]) -> Attend:
    """Attention that slides a window in some layers: those that `layer_types` names, else those that `slides` says."""
    window = fields.find_count("sliding_window")
    types = fields.items("layer_types")
    windowed = replace(shape, window=window)

    def attend(index: int) -> tuple[str, AttentionShape]:
        is_sliding = types[index] == "sliding_attention" if types else slides(index)
        return ("sliding", windowed) if window and is_sliding else ("", shape)

    return attend


def same(shape: AttentionShape | LatentShape) -> Attend:
    """Return the same attention for every layer."""
    return lambda _: ("", shape)


def fed_by(shape: MlpShape | ExpertsShape) -> Feed:
    """Return the same MLP or experts for every layer."""
    word = "moe" if isinstance(shape, ExpertsShape) else ""
    return lambda _: (word, shape)


def mixed(dense: MlpShape, sparse: ExpertsShape, is_sparse: Callable[[int], bool]) -> Feed:
    """Experts in some layers, an MLP in the others."""
    return lambda index: ("moe", sparse) if is_sparse(index) else ("dense", dense)


def shared_names(below: str) -> dict[str, str]:
    """Return the names of an MLP that every token uses besides its experts."""
    return {part: f"{below}.{part}_proj" for part in ("gate", "up", "down")}


def _sublayers(
    mixer: AttentionShape | LatentShape, fed: MlpShape | ExpertsShape, *, post_norms: bool
) -> tuple[Sublayer, ...]:
    if not post_norms:
        first, second = (
            Sublayer(mixer=mixer, norm="input_layernorm"),
            Sublayer(mixer=fed, norm="post_attention_layernorm"),
        )
        return first, second
    return (
        Sublayer(mixer=mixer, norm="input_layernorm", post_norm="post_attention_layernorm"),
        Sublayer(mixer=fed, norm="pre_feedforward_layernorm", post_norm="post_feedforward_layernorm"),
    )
