"""Multi-head latent attention, as it is trained: latents are projected up, and attention is by head."""

from collections.abc import Iterator

from shardwise.model.assembly.attention import core, rotation
from shardwise.model.assembly.norms import kept_input, norm_parameters
from shardwise.model.assembly.part import Part, linear, matmul
from shardwise.model.model import Cache, Parameter
from shardwise.model.operations import Norm, Operation, Saved, Width
from shardwise.model.shape import LatentShape, NormShape

UP = ("mla_up",)


def latent_attention(shape: LatentShape, hidden: int, norm: NormShape) -> Part:
    """From the normalised input to what is added to the residual. Decoding keeps the latent, not the heads."""
    return Part(
        operations=tuple(_operations(shape, hidden, norm)),
        parameters=tuple(_parameters(shape, hidden, norm)),
        cache=Cache(elements=shape.kv_rank + shape.rope_dim),
        reduces=True,
    )


def _operations(shape: LatentShape, hidden: int, norm: NormShape) -> Iterator[Operation]:
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


def _parameters(shape: LatentShape, hidden: int, norm: NormShape) -> Iterator[Parameter]:
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
