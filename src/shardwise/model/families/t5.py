"""T5: an encoder, and a decoder whose layers read what the encoder gave. Both see sequences of one length here."""

from dataclasses import replace

from shardwise.model.assembly.ends import embedding, head
from shardwise.model.assembly.part import norm
from shardwise.model.assembly.transformer import stack
from shardwise.model.families.fields import Fields
from shardwise.model.model import Model
from shardwise.model.shape import AttentionShape, EmbeddingShape, HeadShape, LayerShape, MlpShape, NormShape, Sublayer

_NORMS = NormShape()


def t5(fields: Fields, name: str) -> Model:
    """Return the blocks: table, encoder, its norm, table again, decoder, head."""
    hidden, vocabulary = fields.count("d_model"), fields.count("vocab_size")
    num_layers = fields.count("num_layers")
    dropout = fields.drops("dropout_rate", default=0.1)
    decoder_layers = fields.count("num_decoder_layers", default=num_layers)
    again = embedding(
        EmbeddingShape(tokens="decoder.embed_tokens"),
        hidden,
        vocabulary,
        _NORMS,
        dropout=dropout,
        kind="decoder embedding",
    )
    tied = fields.flag("tie_word_embeddings", True)
    blocks = (
        embedding(EmbeddingShape(tokens="shared"), hidden, vocabulary, _NORMS, dropout=dropout),
        *stack(_layers(fields, num_layers, decodes=False), hidden, _NORMS, dropout=dropout),
        norm("encoder.final_layer_norm", hidden, _NORMS).block(
            "encoder norm", input_elements=hidden, output_elements=hidden
        ),
        replace(again, output_elements=2 * hidden),
        *stack(_layers(fields, decoder_layers, decodes=True), hidden, _NORMS, dropout=dropout),
        head(HeadShape(norm="decoder.final_layer_norm"), hidden, vocabulary, _NORMS),
    )
    shared = ("shared.weight", "decoder.embed_tokens.weight", *(("lm_head.weight",) if tied else ()))
    return Model(name=name, family="t5", blocks=blocks, ties=(shared,), hidden=hidden, vocabulary=vocabulary)


def _layers(fields: Fields, num_layers: int, *, decodes: bool) -> tuple[LayerShape, ...]:
    """Return the layers. The first layer of a stack learns the relative positions, and the others use them."""
    side = "decoder" if decodes else "encoder"
    buckets = fields.count("relative_attention_num_buckets", default=32)
    first = _layer(fields, f"{side} first", side, buckets)
    return (first, *(_layer(fields, side, side, 0),) * (num_layers - 1))


def _layer(fields: Fields, kind: str, side: str, buckets: int) -> LayerShape:
    heads, head_dim = fields.count("num_heads"), fields.count("d_kv")
    decodes = side == "decoder"

    def attend(index: int, module: str, *, cross: bool) -> Sublayer:
        below = f"layer.{index}.{module}"
        shape = AttentionShape(
            names={
                **{part: f"{below}.{part}" for part in "qkvo"},
                "positions": f"{below}.relative_attention_bias.weight",
            },
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            causal=decodes and not cross,
            rotary=False,
            dropout=fields.drops("dropout_rate", default=0.1),
            cross=cross,
            position_buckets=0 if cross else buckets,
        )
        return Sublayer(mixer=shape, norm=f"layer.{index}.layer_norm")

    attends = [attend(0, "SelfAttention", cross=False)]
    if decodes:
        attends.append(attend(1, "EncDecAttention", cross=True))
    below = f"layer.{len(attends)}"
    gated = fields.text("feed_forward_proj", "relu").startswith("gated")
    names = {"up": "wi_1" if gated else "wi", "gate": "wi_0", "down": "wo"}
    mlp = MlpShape(
        names={part: f"{below}.DenseReluDense.{name}" for part, name in names.items()},
        width=fields.count("d_ff"),
        gated=gated,
    )
    fed = Sublayer(mixer=mlp, norm=f"{below}.layer_norm")
    return LayerShape(kind=kind, stack=f"{side}.block", sublayers=(*attends, fed))
