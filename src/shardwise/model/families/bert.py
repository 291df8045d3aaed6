"""BERT with its head for masked words."""

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

_TABLES = "bert.embeddings"


def bert(fields: Fields, name: str) -> Model:
    """Norms after the residuals, three tables, and a dense layer before the logits."""
    hidden = fields.count("hidden_size")
    heads = fields.heads(hidden)
    positions = fields.count("max_position_embeddings", default=512)
    dropout = fields.drops("hidden_dropout_prob", "attention_probs_dropout_prob", default=0.1)
    attention = AttentionShape(
        names={
            "q": "attention.self.query",
            "k": "attention.self.key",
            "v": "attention.self.value",
            "o": "attention.output.dense",
        },
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        qkv_bias=True,
        out_bias=True,
        causal=False,
        rotary=False,
        dropout=dropout,
    )
    mlp = MlpShape(
        names={"up": "intermediate.dense", "down": "output.dense"},
        width=fields.count("intermediate_size"),
        gated=False,
        bias=True,
    )
    layer = LayerShape(
        kind="layer",
        stack="bert.encoder.layer",
        sublayers=(
            Sublayer(mixer=attention, after_norm="attention.output.LayerNorm"),
            Sublayer(mixer=mlp, after_norm="output.LayerNorm"),
        ),
    )
    predictions = "cls.predictions"
    types = fields.count("type_vocab_size", default=2)
    return transformer(
        Shape(
            name=name,
            family="bert",
            hidden=hidden,
            vocabulary=fields.count("vocab_size"),
            layers=(layer,) * fields.count("num_hidden_layers"),
            embedding=EmbeddingShape(
                tokens=f"{_TABLES}.word_embeddings",
                further={f"{_TABLES}.position_embeddings": positions, f"{_TABLES}.token_type_embeddings": types},
                norm=f"{_TABLES}.LayerNorm",
            ),
            head=HeadShape(
                weight=f"{predictions}.decoder",
                norm=None,
                tied=fields.flag("tie_word_embeddings", True),
                bias=f"{predictions}.bias",
                transform=(f"{predictions}.transform.dense", f"{predictions}.transform.LayerNorm"),
            ),
            norm=NormShape(kind="layer", bias=True),
            dropout=dropout,
            max_sequence=positions,
        )
    )
