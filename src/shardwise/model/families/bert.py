"""BERT with its head for masked words."""

from shardwise.model.assembly.transformer import transformer
from shardwise.model.families.fields import Fields
from shardwise.model.families.gpt import BIASED, in_turn
from shardwise.model.model import Model
from shardwise.model.shape import EmbeddingShape, HeadShape

_TABLES = "bert.embeddings"
_NAMES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}


def bert(fields: Fields, name: str) -> Model:
    """Norms after the residuals, three tables, and a dense layer before the logits."""
    hidden = fields.count("hidden_size")
    positions = fields.count("max_position_embeddings", default=512)
    dropout = fields.drops("hidden_dropout_prob", "attention_probs_dropout_prob", default=0.1)
    layer = in_turn(
        "bert.encoder.layer",
        _NAMES,
        ("attention.output.LayerNorm", "output.LayerNorm"),
        hidden,
        fields.heads(hidden),
        width=fields.count("intermediate_size"),
        causal=False,
        rotary=False,
        dropout=dropout,
        after=True,
    )
    types = fields.count("type_vocab_size", default=2)
    embedding = EmbeddingShape(
        tokens=f"{_TABLES}.word_embeddings",
        further={f"{_TABLES}.position_embeddings": positions, f"{_TABLES}.token_type_embeddings": types},
        norm=f"{_TABLES}.LayerNorm",
    )
    predictions = "cls.predictions"
    head = HeadShape(
        weight=f"{predictions}.decoder",
        norm=None,
        tied=fields.flag("tie_word_embeddings", True),
        bias=f"{predictions}.bias",
        transform=(f"{predictions}.transform.dense", f"{predictions}.transform.LayerNorm"),
    )
    return transformer(
        name,
        "bert",
        hidden,
        fields.count("vocab_size"),
        layers=(layer,) * fields.count("num_hidden_layers"),
        ends=(embedding, head),
        norms=BIASED,
        dropout=dropout,
        max_sequence=positions,
    )
