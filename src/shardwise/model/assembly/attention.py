"""Attention: projections, norms and rotation of queries and keys, the product, the output projection.

By heads, or multi-head latent as it is trained: latents are projected up, and attention is by head.
"""

from collections.abc import Iterator
from functools import partial

from shardwise.model.assembly.part import Part, kept_input, linear, matmul, norm_parameters
from shardwise.model.model import Cache, Parameter
from shardwise.model.operations import Attention, Elementwise, Moves, Norm, Operation, Saved, Width
from shardwise.model.shape import AttentionShape, LatentShape, NormShape
from shardwise.model.traffic import FLOAT32

CORE = ("core_attention",)
UP = ("mla_up",)


def attention(shape: AttentionShape, hidden: int, norm: NormShape, *, rows: int | None = None) -> Part:
    """Attention from its normalised input to what is added to the residual."""
    return Part(
        operations=tuple(_operations(shape, hidden, norm, rows)),
        parameters=tuple(_parameters(shape, hidden, norm)),
        cache=None if shape.cross else _cache(shape),
        reduces=True,
    )


def core(
    heads: int,
    kv_heads: int,
    qk_dim: int,
    v_dim: int,
    *,
    shape: AttentionShape | None = None,
    rows: int | None = None,
    made_by: tuple[str, ...] = (),
) -> Attention:
    """Return the attention product and what it keeps: queries, keys, values, and scores or, with flash, one sum per
    row.

    Korthikanti et al. 2022, section 4.1: the probabilities, and with dropout its mask and its output. `made_by` is the
    choice of recomputation that makes queries, keys and values again.
    """
    dropout = shape is not None and shape.dropout
    save = partial(Saved, cut="tp", rows=rows)
    # An element for each head, query and key.
    pairs = heads if rows is None else heads * rows
    score = partial(save, elements=pairs, units=heads, per_key=rows is None, when="scores", dropped_by=CORE)
    kept = [
        save(name="queries", elements=heads * qk_dim, units=heads, dropped_by=made_by),
        save(name="keys", elements=kv_heads * qk_dim, units=kv_heads, dropped_by=made_by),
        save(name="values", elements=kv_heads * v_dim, units=kv_heads, dropped_by=made_by),
        save(name="sums", elements=heads, units=heads, width=4, when="flash"),
        score(name="probabilities"),
    ]
    if dropout:
        kept += [score(name="dropout mask", width=1), score(name="dropped probabilities")]
    # Plain torch's softmax gives float32, and keys and values are repeated for each query that shares them.
    kept.append(score(name="probabilities in float32", width=FLOAT32, when="unfused scores"))
    if heads > kv_heads:
        repeated = (heads - kv_heads) * (qk_dim + v_dim)
        kept.append(save(name="repeated", elements=repeated, when="unfused scores", dropped_by=CORE))
    kept.append(save(name="attended", elements=heads * v_dim, units=heads))
    return Attention(
        name="attention",
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        causal=shape is None or (shape.causal and not shape.cross),
        window=None if shape is None else shape.window,
        chunk=None if shape is None else shape.chunk,
        dropout=dropout,
        rows=rows,
        saves=tuple(kept),
        rerun_by=CORE,
    )


def rotation(elements: int, *, rows: int | None = None) -> Elementwise:
    """Rotary positions: once through memory, or plain torch's halving, negating, joining, two products and a sum.

    Plain torch's backward fills in the other half with zeros each time: counted call by call.
    """
    once = Moves(elements, elements, elements, elements)
    unfused = Moves(elements * 11 // 2, elements * 9 // 2, elements * 15 // 2, elements * 13 // 2)
    return Elementwise(name="rotation", fused=once, unfused=unfused, cut="tp", rows=rows)


def _operations(shape: AttentionShape, hidden: int, norm: NormShape, rows: int | None) -> Iterator[Operation]:
    queries, keys = Width(shape.heads, shape.head_dim), Width(shape.kv_heads, shape.head_dim)
    whole = Width(hidden)
    if shape.cross:  # Queries from the decoder, keys and values from the encoder: two inputs, two products.
        yield matmul("q", whole, queries, sharding="column", bias=shape.qkv_bias, rows=rows)
        yield matmul("kv", whole, (keys, keys), sharding="column", bias=shape.qkv_bias, rows=rows)
    else:
        yield matmul("qkv", whole, (queries, keys, keys), sharding="column", bias=shape.qkv_bias, rows=rows)
    turned = queries.elements + keys.elements
    if shape.qk_norm != "none":
        kept = kept_input(turned, norm, cut="tp", rows=rows)
        yield Norm(name="qk_norm", kind=norm.kind, elements=turned, cut="tp", rows=rows, saves=kept)
    if shape.rotary:
        yield rotation(turned, rows=rows)
    yield core(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, shape=shape, rows=rows)
    yield matmul("out", queries, whole, sharding="row", bias=shape.out_bias, rows=rows)


def _parameters(shape: AttentionShape, hidden: int, norm: NormShape) -> Iterator[Parameter]:
    queries, keys = Width(shape.heads, shape.head_dim), Width(shape.kv_heads, shape.head_dim)
    whole = Width(hidden)
    names = shape.names
    if "qkv" in names:
        parts = (queries, keys, keys)
        yield from linear(
            names["qkv"], whole, parts, sharding="column", bias=shape.qkv_bias, transposed=shape.transposed
        )
    else:
        for part, width in (("q", queries), ("k", keys), ("v", keys)):
            yield from linear(names[part], whole, width, sharding="column", bias=shape.qkv_bias)
    yield from linear(names["o"], queries, whole, sharding="row", bias=shape.out_bias, transposed=shape.transposed)
    if shape.qk_norm == "head":
        yield from norm_parameters(names["q_norm"], shape.head_dim, norm)
        yield from norm_parameters(names["k_norm"], shape.head_dim, norm)
    if shape.sinks:
        yield Parameter(name=names["sinks"], shape=(shape.heads,), role="other", tp_dim=0)
    if shape.position_buckets:
        buckets = (shape.position_buckets, shape.heads)
        yield Parameter(name=names["positions"], shape=buckets, role="embedding", tp_dim=1)


def _cache(shape: AttentionShape) -> Cache:
    longest = shape.window if shape.chunk is None else shape.chunk
    return Cache(elements=2 * shape.kv_heads * shape.head_dim, units=shape.kv_heads, window=longest)


def latent_attention(shape: LatentShape, hidden: int, norm: NormShape) -> Part:
    """Return the part from the normalised input to the residual. Decoding keeps the latent, not the heads."""
    return Part(
        operations=tuple(_latent_operations(shape, hidden, norm)),
        parameters=tuple(_latent_parameters(shape, hidden, norm)),
        cache=Cache(elements=shape.kv_rank + shape.rope_dim),
        reduces=True,
    )


def _latent_operations(shape: LatentShape, hidden: int, norm: NormShape) -> Iterator[Operation]:
    qk_dim = shape.nope_dim + shape.rope_dim
    queries = Width(shape.heads, qk_dim)
    if shape.q_rank:
        yield matmul("q_down", Width(hidden), Width(shape.q_rank))
        yield _latent_norm("q_norm", shape.q_rank, norm)
        yield matmul("q_up", Width(shape.q_rank), queries, sharding="column", rerun_by=UP)
    else:
        yield matmul("q", Width(hidden), queries, sharding="column")
    yield matmul("kv_down", Width(hidden), (Width(shape.kv_rank), Width(shape.rope_dim)))
    yield _latent_norm("kv_norm", shape.kv_rank, norm)
    expanded = Width(shape.heads, shape.nope_dim + shape.v_dim)
    yield matmul("kv_up", Width(shape.kv_rank), expanded, sharding="column", rerun_by=UP)
    yield rotation((shape.heads + 1) * shape.rope_dim)
    yield core(shape.heads, shape.heads, qk_dim, shape.v_dim, made_by=UP)
    yield matmul("out", Width(shape.heads, shape.v_dim), Width(hidden), sharding="row", bias=shape.bias)


def _latent_norm(name: str, rank: int, norm: NormShape) -> Norm:
    output = Saved(name="latent", elements=rank, dropped_by=("norm",))
    return Norm(name=name, kind=norm.kind, elements=rank, saves=(*kept_input(rank, norm), output), rerun_by=("norm",))


def _latent_parameters(shape: LatentShape, hidden: int, norm: NormShape) -> Iterator[Parameter]:
    names = shape.names
    queries = Width(shape.heads, shape.nope_dim + shape.rope_dim)
    if shape.q_rank:
        yield from linear(names["q_down"], Width(hidden), Width(shape.q_rank), bias=shape.bias)
        yield from norm_parameters(names["q_norm"], shape.q_rank, norm)
        yield from linear(names["q_up"], Width(shape.q_rank), queries, sharding="column")
    else:
        yield from linear(names["q"], Width(hidden), queries, sharding="column")
    yield from linear(names["kv_down"], Width(hidden), Width(shape.kv_rank + shape.rope_dim), bias=shape.bias)
    yield from norm_parameters(names["kv_norm"], shape.kv_rank, norm)
    expanded = Width(shape.heads, shape.nope_dim + shape.v_dim)
    yield from linear(names["kv_up"], Width(shape.kv_rank), expanded, sharding="column")
    yield from linear(names["o"], Width(shape.heads, shape.v_dim), Width(hidden), sharding="row", bias=shape.bias)
