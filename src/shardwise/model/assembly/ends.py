"""The two ends of a language model: embedding; final norm, head and loss."""

from shardwise.model.assembly.part import Part, joined, linear, matmul, norm, residual
from shardwise.model.model import Block, Parameter
from shardwise.model.operations import CrossEntropy, Elementwise, Embedding, Moves, Saved, Sharding, Width
from shardwise.model.shape import EmbeddingShape, HeadShape, NormShape
from shardwise.model.traffic import FLOAT32

INT64 = 8


def embedding(
    shape: EmbeddingShape,
    hidden: int,
    vocabulary: int,
    norms: NormShape,
    *,
    dropout: bool = False,
    kind: str = "embedding",
) -> Block:
    """Return the embedding. It keeps the tokens and the dropout mask."""
    width = shape.width or hidden
    tables = [_table(shape.tokens, vocabulary, width, sharding="row")]
    tables += [_table(name, size, hidden, sharding="none") for name, size in shape.further.items()]
    parts = [joined(tables)]
    if shape.projection is not None:
        projected = matmul("project_in", Width(width), Width(hidden))
        parts.append(Part(operations=(projected,), parameters=linear(shape.projection, Width(width), Width(hidden))))
    if len(tables) > 1 or dropout:
        parts.append(Part(operations=(residual(hidden, dropout=dropout, num_added=max(len(tables) - 1, 1)),)))
    if shape.norm is not None:
        parts.append(norm(shape.norm, hidden, norms))
    return joined(parts).block(kind, input_elements=0, output_elements=hidden, num_reductions=1)


def head(shape: HeadShape, hidden: int, vocabulary: int, norms: NormShape, *, table_width: int | None = None) -> Block:
    """Vectors to logits to the loss."""
    parts = [norm(shape.norm, hidden, norms)] if shape.norm is not None else []
    if shape.transform is not None:
        parts.append(_transform(*shape.transform, hidden, norms))
    width = table_width or hidden
    if shape.projection is not None:
        projected = matmul("project_out", Width(hidden), Width(width))
        parts.append(Part(operations=(projected,), parameters=linear(shape.projection, Width(hidden), Width(width))))
    logits = matmul("head", Width(width), Width(vocabulary), sharding="column", bias=shape.bias is not None)
    parameters = linear(shape.weight, Width(width), Width(vocabulary), sharding="column")
    if shape.bias is not None:
        parameters += (Parameter(name=shape.bias, shape=(vocabulary,), role="bias", tp_dim=0),)
    parts.append(Part(operations=(logits, cross_entropy(vocabulary)), parameters=parameters))
    return joined(parts).block("head", input_elements=hidden, output_elements=0, num_reductions=1)


def cross_entropy(vocabulary: int, *, rows: int | None = None) -> CrossEntropy:
    """Return the loss. A fused kernel keeps the logits (or their gradient) unchanged; plain torch a float32 softmax."""
    kept = (
        Saved(name="logits", elements=vocabulary, cut="tp", rows=rows, when="fused"),
        Saved(name="softmax", elements=vocabulary, cut="tp", width=FLOAT32, rows=rows, when="unfused"),
    )
    return CrossEntropy(name="loss", vocabulary=vocabulary, rows=rows, saves=kept)


def _table(name: str, size: int, width: int, *, sharding: Sharding) -> Part:
    cut_rows = sharding == "row"
    tokens = Saved(name="indices", elements=1, width=INT64, cut="whole")
    looked_up = Embedding(
        name=name,
        vocabulary=size,
        elements=width,
        sharding=sharding,
        saves=(tokens,) if cut_rows else (),
    )
    table = Parameter(name=f"{name}.weight", shape=(size, width), role="embedding", tp_dim=0 if cut_rows else None)
    return Part(operations=(looked_up,), parameters=(table,))


def _transform(dense: str, normed: str, hidden: int, norms: NormShape) -> Part:
    """Return a dense layer with a nonlinearity and a norm (BERT)."""
    projected = matmul("transform", Width(hidden), Width(hidden), bias=True)
    moves = Moves(hidden, hidden, 2 * hidden, hidden)
    kept = Saved(name="transformed", elements=hidden)
    activated = Elementwise(name="nonlinearity", fused=moves, unfused=moves, saves=(kept,))
    weights = linear(dense, Width(hidden), Width(hidden), bias=True)
    return joined((Part(operations=(projected, activated), parameters=weights), norm(normed, hidden, norms)))
