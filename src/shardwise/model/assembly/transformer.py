"""Shapes made into a model: embedding, layers and head, each layer its sublayers with norms and residual sums."""

from collections.abc import Iterator

from shardwise.model.assembly.attention import attention, latent_attention
from shardwise.model.assembly.ends import embedding, head
from shardwise.model.assembly.feedforward import experts, mlp
from shardwise.model.assembly.mamba import mamba
from shardwise.model.assembly.part import Part, joined, norm, residual
from shardwise.model.model import Block, Model
from shardwise.model.shape import (
    AttentionShape,
    EmbeddingShape,
    ExpertsShape,
    HeadShape,
    LatentShape,
    LayerShape,
    MambaShape,
    Mixer,
    MlpShape,
    NormShape,
)


def transformer(
    name: str,
    family: str,
    hidden: int,
    vocabulary: int,
    *,
    layers: tuple[LayerShape, ...],
    ends: tuple[EmbeddingShape, HeadShape],
    norms: NormShape | None = None,
    dropout: bool = False,
    max_sequence: int | None = None,
) -> Model:
    """Return a decoder or an encoder. `dropout` is after the embedding, after each sublayer and on the scores."""
    begin, end = ends
    norms = norms or NormShape()
    first = embedding(begin, hidden, vocabulary, norms, dropout=dropout)
    last = head(end, hidden, vocabulary, norms, table_width=begin.width)
    return Model(
        name=name,
        family=family,
        blocks=(first, *stack(layers, hidden, norms, dropout=dropout), last),
        ties=((f"{begin.tokens}.weight", f"{end.weight}.weight"),) if end.tied else (),
        hidden=hidden,
        vocabulary=vocabulary,
        max_sequence=max_sequence,
    )


def stack(
    layers: tuple[LayerShape, ...],
    hidden: int,
    norms: NormShape,
    *,
    dropout: bool = False,
    rows: int | None = None,
) -> tuple[Block, ...]:
    """Return layers as blocks, one object for all of a kind."""
    shapes: dict[str, LayerShape] = {}
    blocks: dict[str, Block] = {}
    for each in layers:
        if each.kind not in blocks:
            shapes[each.kind] = each
            blocks[each.kind] = _layer(each, hidden, norms, dropout=dropout, rows=rows)
        assert each is shapes[each.kind] or each == shapes[each.kind], f"two different layers are of kind {each.kind}"
    return tuple(blocks[each.kind] for each in layers)


def _layer(shape: LayerShape, hidden: int, norms: NormShape, *, dropout: bool, rows: int | None) -> Block:
    """Return a layer as a block. What a decoder's layers read of an encoder is passed along with their output."""
    parts = list(_parts(shape, hidden, norms, dropout=dropout, rows=rows))
    whole = joined(parts)
    num_reductions = sum(part.reduces for part in parts)
    crosses = any(isinstance(each.mixer, AttentionShape) and each.mixer.cross for each in shape.sublayers)
    return whole.block(
        shape.kind,
        stack=shape.stack,
        input_elements=hidden,
        output_elements=hidden * (2 if crosses else 1),
        rows=rows,
        num_reductions=1 if shape.parallel else num_reductions,
        cache=whole.cache,
    )


def _parts(shape: LayerShape, hidden: int, norms: NormShape, *, dropout: bool, rows: int | None) -> Iterator[Part]:
    for sublayer in shape.sublayers:
        if sublayer.norm is not None:
            yield norm(sublayer.norm, hidden, norms, rows=rows)
        yield _mixer(sublayer.mixer, hidden, norms, rows)
        if sublayer.post_norm is not None:
            yield norm(sublayer.post_norm, hidden, norms, keeps_output=False, rows=rows)
        if not shape.parallel:
            yield Part(operations=(residual(hidden, dropout=dropout, rows=rows),))
        if sublayer.after_norm is not None:
            yield norm(sublayer.after_norm, hidden, norms, rows=rows)
    if shape.parallel:
        num_added = len(shape.sublayers)
        yield Part(operations=(residual(hidden, dropout=dropout, num_added=num_added, rows=rows),))


def _mixer(shape: Mixer, hidden: int, norms: NormShape, rows: int | None) -> Part:
    match shape:
        case AttentionShape():
            return attention(shape, hidden, norms, rows=rows)
        case LatentShape():
            return latent_attention(shape, hidden, norms)
        case MlpShape():
            return mlp(shape, hidden, rows=rows)
        case ExpertsShape():
            return experts(shape, hidden)
        case MambaShape():
            return mamba(shape, hidden, norms)
