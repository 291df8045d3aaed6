"""Decoders after GPT: layer norm, a plain MLP, each with the names of its own module."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.model.assembly.transformer import transformer
from shardwise.model.families.fields import Fields
from shardwise.model.model import Model
from shardwise.model.shape import (
    AttentionShape,
    EmbeddingShape,
    HeadShape,
    LayerShape,
    MlpShape,
    NormShape,
    Shape,
    Sublayer,
)

_BLOOM_NAMES = {
    "qkv": "self_attention.query_key_value",
    "o": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSizes:
    """What differs in size between decoders of this kind."""

    hidden: int
    heads: int
    kv_heads: int
    width: int
    num_layers: int
    vocabulary: int


def gpt2(fields: Fields, name: str) -> Model:
    """GPT-2, and GPT-3 which has its shape: learned positions, weights stored as inputs x outputs."""
    hidden = fields.count("n_embd", "hidden_size")
    heads = fields.heads(hidden, "n_head", "num_attention_heads")
    sizes = _sizes(fields, hidden, heads, layers="n_layer", width=fields.find_count("n_inner"))
    names = {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    positions = fields.count("n_positions", "max_position_embeddings", default=1024)
    dropout = fields.drops("resid_pdrop", "embd_pdrop", "attn_pdrop", default=0.1)
    mixers = _mixers(sizes, names, rotary=False, dropout=dropout, transposed=True)
    return _decoder(
        fields,
        name,
        sizes,
        _in_turn("transformer.h", mixers, ("ln_1", "ln_2")),
        EmbeddingShape(tokens="transformer.wte", further={"transformer.wpe": positions}),
        HeadShape(norm="transformer.ln_f", tied=fields.flag("tie_word_embeddings", True)),
        dropout=dropout,
        max_sequence=positions,
    )


def bloom(fields: Fields, name: str) -> Model:
    """BLOOM: positions as slopes on the scores, a norm after the embedding."""
    hidden = fields.count("hidden_size", "n_embed")
    sizes = _sizes(fields, hidden, fields.heads(hidden, "n_head", "num_attention_heads"), layers="n_layer")
    dropout = fields.drops("hidden_dropout", "attention_dropout")
    mixers = _mixers(sizes, _BLOOM_NAMES, rotary=False, dropout=dropout)
    return _decoder(
        fields,
        name,
        sizes,
        _in_turn("transformer.h", mixers, ("input_layernorm", "post_attention_layernorm")),
        EmbeddingShape(tokens="transformer.word_embeddings", norm="transformer.word_embeddings_layernorm"),
        HeadShape(norm="transformer.ln_f", tied=fields.flag("tie_word_embeddings", True)),
        dropout=dropout,
        max_sequence=fields.find_count("seq_length"),
    )


def mpt(fields: Fields, name: str) -> Model:
    """MPT: no biases at all, positions as slopes on the scores."""
    hidden = fields.count("d_model")
    width = fields.count("expansion_ratio", default=4) * hidden
    sizes = _sizes(fields, hidden, fields.heads(hidden, "n_heads"), layers="n_layers", width=width)
    names = {"qkv": "attn.Wqkv", "o": "attn.out_proj", "up": "ffn.up_proj", "down": "ffn.down_proj"}
    dropout = fields.drops("resid_pdrop", "emb_pdrop")
    mixers = _mixers(sizes, names, rotary=False, dropout=dropout, bias=False)
    return _decoder(
        fields,
        name,
        sizes,
        _in_turn("transformer.blocks", mixers, ("norm_1", "norm_2")),
        EmbeddingShape(tokens="transformer.wte"),
        HeadShape(norm="transformer.norm_f", tied=fields.flag("tie_word_embeddings", True)),
        dropout=dropout,
        norm=NormShape(kind="layer"),
        max_sequence=fields.find_count("max_seq_len"),
    )


def gpt_neox(fields: Fields, name: str) -> Model:
    """GPT-NeoX and Pythia: attention and MLP side by side, each with its norm."""
    hidden = fields.count("hidden_size")
    sizes = _sizes(fields, hidden, fields.heads(hidden), width=fields.find_count("intermediate_size"))
    names = {
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }
    dropout = fields.drops("hidden_dropout", "attention_dropout")
    mixers = _mixers(sizes, names, dropout=dropout, qkv_bias=fields.flag("attention_bias", True))
    norms = ("input_layernorm", "post_attention_layernorm")
    side_by_side = fields.flag("use_parallel_residual", True)
    return _decoder(
        fields,
        name,
        sizes,
        _in_turn("gpt_neox.layers", mixers, norms, parallel=side_by_side),
        EmbeddingShape(tokens="gpt_neox.embed_in"),
        HeadShape(norm="gpt_neox.final_layer_norm", tied=fields.flag("tie_word_embeddings")),
        dropout=dropout,
        max_sequence=fields.find_count("max_position_embeddings"),
    )


def falcon(fields: Fields, name: str) -> Model:
    """Falcon: side by side with one norm (7B) or two (40B, 180B), or one after the other (RW)."""
    hidden = fields.count("hidden_size")
    heads = fields.heads(hidden, "num_attention_heads", "n_head")
    grouped = fields.flag("new_decoder_architecture")
    single = fields.flag("multi_query", True) and not grouped
    kv_heads = 1 if single else fields.count("num_kv_heads", "n_head_kv", default=heads) if grouped else heads
    sizes = _sizes(
        fields, hidden, heads, kv_heads=kv_heads, layers="n_layer", width=fields.find_count("ffn_hidden_size")
    )
    bias, dropout = fields.flag("bias"), fields.drops("hidden_dropout", "attention_dropout")
    rotary = not fields.flag("alibi")
    mixers = _mixers(sizes, _BLOOM_NAMES, rotary=rotary, dropout=dropout, bias=bias)
    side_by_side = grouped or fields.flag("parallel_attn", True)
    two = grouped and fields.count("num_ln_in_parallel_attn", default=2) == 2
    first = "ln_attn" if two else "input_layernorm"
    second = "ln_mlp" if two else None if side_by_side else "post_attention_layernorm"
    return _decoder(
        fields,
        name,
        sizes,
        _in_turn("transformer.h", mixers, (first, second), parallel=side_by_side),
        EmbeddingShape(tokens="transformer.word_embeddings"),
        HeadShape(norm="transformer.ln_f", tied=fields.flag("tie_word_embeddings", True)),
        dropout=dropout,
        max_sequence=fields.find_count("max_position_embeddings"),
    )


def phi(fields: Fields, name: str) -> Model:
    """Phi 1 and 2: side by side with one norm, biases everywhere, also on the head."""
    hidden = fields.count("hidden_size")
    heads = fields.heads(hidden)
    sizes = _sizes(
        fields,
        hidden,
        heads,
        kv_heads=fields.count("num_key_value_heads", default=heads),
        width=fields.find_count("intermediate_size"),
    )
    names = {
        **{part: f"self_attn.{part}_proj" for part in "qkv"},
        "o": "self_attn.dense",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    }
    dropout = fields.drops("resid_pdrop", "attention_dropout")
    mixers = _mixers(sizes, names, dropout=dropout)
    return _decoder(
        fields,
        name,
        sizes,
        _in_turn("model.layers", mixers, ("input_layernorm", None), parallel=True),
        EmbeddingShape(tokens="model.embed_tokens"),
        HeadShape(norm="model.final_layernorm", tied=fields.flag("tie_word_embeddings"), bias="lm_head.bias"),
        dropout=dropout,
        max_sequence=fields.find_count("max_position_embeddings"),
    )


def opt(fields: Fields, name: str) -> Model:
    """OPT: learned positions (two more than it says), norms before, or after in the 350m, whose table is narrow."""
    hidden = fields.count("hidden_size")
    sizes = _sizes(fields, hidden, fields.heads(hidden), width=fields.count("ffn_dim"))
    names = {
        **{part: f"self_attn.{part}_proj" for part in "qkv"},
        "o": "self_attn.out_proj",
        "up": "fc1",
        "down": "fc2",
    }
    dropout = fields.drops("dropout", default=0.1)
    bias = fields.flag("enable_bias", True)
    mixers = _mixers(sizes, names, rotary=False, dropout=dropout, bias=bias)
    before = fields.flag("do_layer_norm_before", True)
    layer = _in_turn("model.decoder.layers", mixers, ("self_attn_layer_norm", "final_layer_norm"), after=not before)
    narrow = fields.count("word_embed_proj_dim", default=hidden)
    width = None if narrow == hidden else narrow
    positions = fields.count("max_position_embeddings", default=2048)
    last = before and not fields.flag("_remove_final_layer_norm")
    below = "model.decoder"
    return _decoder(
        fields,
        name,
        sizes,
        layer,
        EmbeddingShape(
            tokens=f"{below}.embed_tokens",
            further={f"{below}.embed_positions": positions + 2},
            width=width,
            projection=f"{below}.project_in" if width else None,
        ),
        HeadShape(
            norm=f"{below}.final_layer_norm" if last else None,
            tied=fields.flag("tie_word_embeddings", True),
            projection=f"{below}.project_out" if width else None,
        ),
        dropout=dropout,
        max_sequence=positions,
    )


def _sizes(
    fields: Fields,
    hidden: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    layers: str = "num_hidden_layers",
    width: int | None = None,
) -> GptSizes:
    return GptSizes(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        width=width or 4 * hidden,
        num_layers=fields.count(layers, "num_hidden_layers"),
        vocabulary=fields.count("vocab_size"),
    )


def _mixers(
    sizes: GptSizes,
    names: Mapping[str, str],
    *,
    rotary: bool = True,
    dropout: bool = False,
    bias: bool = True,
    qkv_bias: bool | None = None,
    transposed: bool = False,
) -> tuple[AttentionShape, MlpShape]:
    attends = bias if qkv_bias is None else qkv_bias
    attention = AttentionShape(
        names=names,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.hidden // sizes.heads,
        qkv_bias=attends,
        out_bias=attends,
        rotary=rotary,
        dropout=dropout,
        transposed=transposed,
    )
    return attention, MlpShape(names=names, width=sizes.width, gated=False, bias=bias, transposed=transposed)


def _in_turn(
    stack: str,
    mixers: tuple[AttentionShape, MlpShape],
    norms: tuple[str | None, str | None],
    *,
    parallel: bool = False,
    after: bool = False,
) -> LayerShape:
    """Attention and MLP with their norms before them, or after the residual."""
    attention, mlp = mixers
    first, second = norms
    sublayers = (
        Sublayer(mixer=attention, after_norm=first) if after else Sublayer(mixer=attention, norm=first),
        Sublayer(mixer=mlp, after_norm=second) if after else Sublayer(mixer=mlp, norm=second),
    )
    return LayerShape(kind="layer", stack=stack, sublayers=sublayers, parallel=parallel)


def _decoder(
    fields: Fields,
    name: str,
    sizes: GptSizes,
    layer: LayerShape,
    embedding: EmbeddingShape,
    head: HeadShape,
    *,
    dropout: bool,
    norm: NormShape | None = None,
    max_sequence: int | None = None,
) -> Model:
    return transformer(
        Shape(
            name=name,
            family=fields.text("model_type", "gpt2"),
            hidden=sizes.hidden,
            vocabulary=sizes.vocabulary,
            layers=(layer,) * sizes.num_layers,
            embedding=embedding,
            head=head,
            norm=norm or NormShape(kind="layer", bias=True),
            dropout=dropout,
            max_sequence=max_sequence,
        )
    )
