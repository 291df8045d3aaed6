"""A shape made into a model."""

from shardwise.model.assembly.ends import embedding, head
from shardwise.model.assembly.layer import layer
from shardwise.model.model import Block, Model
from shardwise.model.shape import LayerShape, NormShape, Shape


def transformer(shape: Shape) -> Model:
    """The model of a decoder or an encoder: embedding, layers, head. Equal layers are one block."""
    first = embedding(shape.embedding, shape.hidden, shape.vocabulary, shape.norm, dropout=shape.dropout)
    last = head(shape.head, shape.hidden, shape.vocabulary, shape.norm, table_width=shape.embedding.width)
    table, logits = f"{shape.embedding.tokens}.weight", f"{shape.head.weight}.weight"
    return Model(
        name=shape.name,
        family=shape.family,
        blocks=(first, *stack(shape.layers, shape.hidden, shape.norm, dropout=shape.dropout), last),
        ties=((table, logits),) if shape.head.tied else (),
        hidden=shape.hidden,
        vocabulary=shape.vocabulary,
        max_sequence=shape.max_sequence,
    )


def stack(
    layers: tuple[LayerShape, ...],
    hidden: int,
    norms: NormShape,
    *,
    dropout: bool = False,
    rows: int | None = None,
) -> tuple[Block, ...]:
    """Layers as blocks, one object for all of a kind."""
    shapes: dict[str, LayerShape] = {}
    blocks: dict[str, Block] = {}
    for each in layers:
        if each.kind not in blocks:
            shapes[each.kind] = each
            blocks[each.kind] = layer(each, hidden, norms, dropout=dropout, rows=rows)
        assert each is shapes[each.kind] or each == shapes[each.kind], f"two different layers are of kind {each.kind}"
    return tuple(blocks[each.kind] for each in layers)
