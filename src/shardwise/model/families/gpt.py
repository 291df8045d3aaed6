"""Decoders after GPT: layer norm, a plain MLP, each with the names of its own module."""

from collections.abc import Mapping

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
    Sublayer,
)

BIASED = NormShape(kind="layer", bias=True)
_MEGATRON_MLP = {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
_BLOOM_NAMES = {"qkv": "self_attention.query_key_value", "o": "self_attention.dense", **_MEGATRON_MLP}
_APART = {part: f"self_attn.{part}_proj" for part in "qkv"}


def gpt2(fields: Fields, name: str) -> Model:
    """GPT-2, and GPT-3 which has its shape: learned positions, weights stored as inputs x outputs."""
    hidden = fields.count("n_embd", "hidden_size")
    positions = fields.count("n_positions", "max_position_embeddings", default=1024)
    layer = in_turn(
        "transformer.h",
        {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        ("ln_1", "ln_2"),
        hidden,
        fields.heads(hidden, "n_head", "num_attention_heads"),
        width=fields.find_count("n_inner"),
        rotary=False,
        dropout=fields.drops("resid_pdrop", "embd_pdrop", "attn_pdrop", default=0.1),
        transposed=True,
    )
    embedding = EmbeddingShape(tokens="transformer.wte", further={"transformer.wpe": positions})
    head = HeadShape(norm="transformer.ln_f", tied=fields.flag("tie_word_embeddings", True))
    return _decoder(fields, name, hidden, layer, embedding, head, max_sequence=positions, layers="n_layer")


def bloom(fields: Fields, name: str) -> Model:
    """BLOOM: positions as slopes on the scores, a norm after the embedding."""
    hidden = fields.count("hidden_size", "n_embed")
    layer = in_turn(
        "transformer.h",
        _BLOOM_NAMES,
        ("input_layernorm", "post_attention_layernorm"),
        hidden,
        fields.heads(hidden, "n_head", "num_attention_heads"),
        rotary=False,
        dropout=fields.drops("hidden_dropout", "attention_dropout"),
    )
    table = "transformer.word_embeddings"
    head = HeadShape(norm="transformer.ln_f", tied=fields.flag("tie_word_embeddings", True))
    embedding, longest = EmbeddingShape(tokens=table, norm=f"{table}_layernorm"), fields.find_count("seq_length")
    return _decoder(fields, name, hidden, layer, embedding, head, max_sequence=longest, layers="n_layer")


def mpt(fields: Fields, name: str) -> Model:
    """MPT: no biases at all, positions as slopes on the scores."""
    hidden = fields.count("d_model")
    layer = in_turn(
        "transformer.blocks",
        {"qkv": "attn.Wqkv", "o": "attn.out_proj", "up": "ffn.up_proj", "down": "ffn.down_proj"},
        ("norm_1", "norm_2"),
        hidden,
        fields.heads(hidden, "n_heads"),
        width=fields.count("expansion_ratio", default=4) * hidden,
        rotary=False,
        dropout=fields.drops("resid_pdrop", "emb_pdrop"),
        bias=False,
    )
    embedding = EmbeddingShape(tokens="transformer.wte")
    head = HeadShape(norm="transformer.norm_f", tied=fields.flag("tie_word_embeddings", True))
    plain, longest = NormShape(kind="layer"), fields.find_count("max_seq_len")
    return _decoder(fields, name, hidden, layer, embedding, head, max_sequence=longest, layers="n_layers", norms=plain)


def gpt_neox(fields: Fields, name: str) -> Model:
    """GPT-NeoX and Pythia: attention and MLP side by side, each with its norm."""
    hidden, biased = fields.count("hidden_size"), fields.flag("attention_bias", True)
    layer = in_turn(
        "gpt_neox.layers",
        {"qkv": "attention.query_key_value", "o": "attention.dense", **_MEGATRON_MLP},
        ("input_layernorm", "post_attention_layernorm"),
        hidden,
        fields.heads(hidden),
        width=fields.find_count("intermediate_size"),
        dropout=fields.drops("hidden_dropout", "attention_dropout"),
        qkv_bias=biased,
        out_bias=biased,
        parallel=fields.flag("use_parallel_residual", True),
    )
    head = HeadShape(norm="gpt_neox.final_layer_norm", tied=fields.flag("tie_word_embeddings"))
    embedding, longest = EmbeddingShape(tokens="gpt_neox.embed_in"), fields.find_count("max_position_embeddings")
    return _decoder(fields, name, hidden, layer, embedding, head, max_sequence=longest)


def falcon(fields: Fields, name: str) -> Model:
    """Falcon: side by side with one norm (7B) or two (40B, 180B), or one after the other (RW)."""
    hidden = fields.count("hidden_size")
    heads = fields.heads(hidden, "num_attention_heads", "n_head")
    grouped = fields.flag("new_decoder_architecture")
    single = fields.flag("multi_query", True) and not grouped
    side_by_side = grouped or fields.flag("parallel_attn", True)
    two = grouped and fields.count("num_ln_in_parallel_attn", default=2) == 2
    first = "ln_attn" if two else "input_layernorm"
    second = "ln_mlp" if two else None if side_by_side else "post_attention_layernorm"
    layer = in_turn(
        "transformer.h",
        _BLOOM_NAMES,
        (first, second),
        hidden,
        heads,
        kv_heads=1 if single else fields.count("num_kv_heads", "n_head_kv", default=heads) if grouped else heads,
        width=fields.find_count("ffn_hidden_size"),
        rotary=not fields.flag("alibi"),
        dropout=fields.drops("hidden_dropout", "attention_dropout"),
        bias=fields.flag("bias"),
        parallel=side_by_side,
    )
    head = HeadShape(norm="transformer.ln_f", tied=fields.flag("tie_word_embeddings", True))
    embedding = EmbeddingShape(tokens="transformer.word_embeddings")
    longest = fields.find_count("max_position_embeddings")
    return _decoder(fields, name, hidden, layer, embedding, head, max_sequence=longest, layers="n_layer")


def phi(fields: Fields, name: str) -> Model:
    """Phi 1 and 2: side by side with one norm, biases everywhere, also on the head."""
    hidden = fields.count("hidden_size")
    heads = fields.heads(hidden)
    layer = in_turn(
        "model.layers",
        {**_APART, "o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
        ("input_layernorm", None),
        hidden,
        heads,
        kv_heads=fields.count("num_key_value_heads", default=heads),
        width=fields.find_count("intermediate_size"),
        dropout=fields.drops("resid_pdrop", "attention_dropout"),
        parallel=True,
    )
    head = HeadShape(norm="model.final_layernorm", tied=fields.flag("tie_word_embeddings"), bias="lm_head.bias")
    embedding, longest = EmbeddingShape(tokens="model.embed_tokens"), fields.find_count("max_position_embeddings")
    return _decoder(fields, name, hidden, layer, embedding, head, max_sequence=longest)


def opt(fields: Fields, name: str) -> Model:
    """OPT: learned positions (two more than it says), norms before, or after in the 350m, whose table is narrow."""
    hidden, below = fields.count("hidden_size"), "model.decoder"
    before = fields.flag("do_layer_norm_before", True)
    layer = in_turn(
        f"{below}.layers",
        {**_APART, "o": "self_attn.out_proj", "up": "fc1", "down": "fc2"},
        ("self_attn_layer_norm", "final_layer_norm"),
        hidden,
        fields.heads(hidden),
        width=fields.count("ffn_dim"),
        rotary=False,
        dropout=fields.drops("dropout", default=0.1),
        bias=fields.flag("enable_bias", True),
        after=not before,
    )
    narrow = fields.count("word_embed_proj_dim", default=hidden)
    width = None if narrow == hidden else narrow
    positions = fields.count("max_position_embeddings", default=2048)
    embedding = EmbeddingShape(
        tokens=f"{below}.embed_tokens",
        further={f"{below}.embed_positions": positions + 2},
        width=width,
        projection=f"{below}.project_in" if width else None,
    )
    head = HeadShape(
        norm=f"{below}.final_layer_norm" if before and not fields.flag("_remove_final_layer_norm") else None,
        tied=fields.flag("tie_word_embeddings", True),
        projection=f"{below}.project_out" if width else None,
    )
    return _decoder(fields, name, hidden, layer, embedding, head, max_sequence=positions)


def in_turn(
    stack: str,
    names: Mapping[str, str],
    norms: tuple[str | None, str | None],
    hidden: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    width: int | None = None,
    causal: bool = True,
    rotary: bool = True,
    dropout: bool = False,
    bias: bool = True,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    transposed: bool = False,
    parallel: bool = False,
    after: bool = False,
) -> LayerShape:
    """Attention and a plain MLP, four times as wide unless `width` says more, with their norms before them, or `after`
    the residual."""
    attention = AttentionShape(
        names=names,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        qkv_bias=bias if qkv_bias is None else qkv_bias,
        out_bias=bias if out_bias is None else out_bias,
        causal=causal,
        rotary=rotary,
        dropout=dropout,
        transposed=transposed,
    )
    mlp = MlpShape(names=names, width=width or 4 * hidden, gated=False, bias=bias, transposed=transposed)
    (before, first), (between, second) = (((None, each) if after else (each, None)) for each in norms)
    sublayers = (
        Sublayer(mixer=attention, norm=before, after_norm=first),
        Sublayer(mixer=mlp, norm=between, after_norm=second),
    )
    return LayerShape(kind="layer", stack=stack, sublayers=sublayers, parallel=parallel)


def _decoder(
    fields: Fields,
    name: str,
    hidden: int,
    layer: LayerShape,
    embedding: EmbeddingShape,
    head: HeadShape,
    *,
    max_sequence: int | None,
    layers: str = "num_hidden_layers",
    norms: NormShape = BIASED,
) -> Model:
    """Equal layers between two ends, with dropout where their attention has it. `layers` is the key of their number."""
    attention = layer.sublayers[0].mixer
    return transformer(
        name,
        fields.text("model_type", "gpt2"),
        hidden,
        fields.count("vocab_size"),
        layers=(layer,) * fields.count(layers, "num_hidden_layers"),
        ends=(embedding, head),
        norms=norms,
        dropout=isinstance(attention, AttentionShape) and attention.dropout,
        max_sequence=max_sequence,
    )
