"""The vision transformer: patches of an image, an encoder, a classifier on the first row."""

from shardwise.errors import ShardwiseError
from shardwise.model.assembly.ends import cross_entropy
from shardwise.model.assembly.part import linear, matmul, norm
from shardwise.model.assembly.transformer import stack
from shardwise.model.families.fields import Fields
from shardwise.model.families.gpt import BIASED, in_turn
from shardwise.model.model import Block, Model, Parameter
from shardwise.model.operations import Convolution, Saved, Width


def vit(fields: Fields, name: str) -> Model:
    """Return the model. Every image gives the same number of rows: its patches, and one for the whole."""
    hidden = fields.count("hidden_size")
    side, patch = fields.count("image_size", default=224), fields.count("patch_size", default=16)
    if side % patch:
        raise ShardwiseError(
            f"{fields.source} has images of {side} pixels a side, which patches of {patch} do not divide",
            remedy=f'"image_size": {side // patch * patch}',
        )
    rows = (side // patch) ** 2 + 1
    dropout = fields.drops("hidden_dropout_prob", "attention_probs_dropout_prob")
    labels = fields.values.get("id2label")
    num_labels = len(labels) if labels else fields.count("num_labels", default=2)
    layer = in_turn(
        "vit.layers",
        {**{part: f"attention.{part}_proj" for part in "qkvo"}, "up": "mlp.fc1", "down": "mlp.fc2"},
        ("layernorm_before", "layernorm_after"),
        hidden,
        fields.heads(hidden),
        width=fields.count("intermediate_size"),
        causal=False,
        rotary=False,
        dropout=dropout,
        qkv_bias=fields.flag("qkv_bias", True),
    )
    return Model(
        name=name,
        family="vit",
        blocks=(
            _patches(hidden, fields.count("num_channels", default=3), side, patch, rows),
            *stack((layer,) * fields.count("num_hidden_layers"), hidden, BIASED, dropout=dropout, rows=rows),
            _classifier(hidden, num_labels, rows),
        ),
        hidden=hidden,
        vocabulary=num_labels,
        sequence=rows,
    )


def _patches(hidden: int, channels: int, side: int, patch: int, rows: int) -> Block:
    below = "vit.embeddings"
    cut = Convolution(
        name="patches",
        in_channels=channels,
        out_channels=hidden,
        kernel=patch * patch,
        positions=rows - 1,
        in_positions=side * side,
        bias=True,
        input_gradient=False,
        saves=(Saved(name="pixels", elements=channels * side * side, rows=1, cut="whole"),),
    )
    weight = f"{below}.patch_embeddings.projection"
    return Block(
        kind="embedding",
        operations=(cut,),
        parameters=(
            Parameter(name=f"{below}.cls_token", shape=(1, 1, hidden), role="embedding"),
            Parameter(name=f"{below}.position_embeddings", shape=(1, rows, hidden), role="embedding"),
            Parameter(name=f"{weight}.weight", shape=(hidden, channels, patch, patch)),
            Parameter(name=f"{weight}.bias", shape=(hidden,), role="bias"),
        ),
        input_elements=0,
        output_elements=hidden,
        rows=rows,
    )


def _classifier(hidden: int, num_labels: int, rows: int) -> Block:
    normed = norm("vit.layernorm", hidden, BIASED, rows=rows)
    logits = matmul("classifier", Width(hidden), Width(num_labels), bias=True, rows=1)
    return Block(
        kind="head",
        operations=(*normed.operations, logits, cross_entropy(num_labels, rows=1)),
        parameters=(*normed.parameters, *linear("classifier", Width(hidden), Width(num_labels), bias=True)),
        input_elements=hidden,
        output_elements=0,
        rows=rows,
    )
