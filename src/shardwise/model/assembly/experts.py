"""A mixture of experts: router, the way to the experts, their MLPs, the way back, and the experts that all meet."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from shardwise.model.assembly.feedforward import mlp, nonlinearity
from shardwise.model.assembly.part import Part, joined, linear, matmul
from shardwise.model.model import Parameter
from shardwise.model.operations import Matmul, Operation, Permutation, Router, Saved, Width
from shardwise.model.shape import ExpertsShape
from shardwise.model.traffic import FLOAT32

MOE = ("moe",)


def experts(shape: ExpertsShape, hidden: int) -> Part:
    """From the normalised input to what is added to the residual."""
    routed = Part(
        operations=tuple(_operations(shape, hidden)),
        parameters=tuple(_parameters(shape, hidden)),
        reduces=True,
    )
    return routed if shape.shared is None else joined((routed, _shared(shape, hidden)))


def _shared(shape: ExpertsShape, hidden: int) -> Part:
    assert shape.shared is not None, "only called where there is a shared expert"
    dense = mlp(shape.shared, hidden)
    if not shape.shared_gate:
        return dense
    gate = Part(
        operations=(matmul("shared_gate", Width(hidden), Width(1)),),
        parameters=linear(shape.names["shared_gate"], Width(hidden), Width(1)),
    )
    return joined((dense, gate))


def _operations(shape: ExpertsShape, hidden: int) -> Iterator[Operation]:
    inner, sent = Width(shape.width), shape.latent or hidden
    routed = partial(Matmul, bias=shape.bias, num_experts=shape.num_experts, top_k=shape.top_k, rerun_by=MOE)
    yield matmul("router", Width(hidden), Width(shape.num_experts), bias=shape.router_bias)
    scores = Saved(name="router scores", elements=2 * shape.num_experts, width=FLOAT32)
    yield Router(name="choice", num_experts=shape.num_experts, top_k=shape.top_k, saves=(scores,))
    if shape.latent:
        yield matmul("latent_down", Width(hidden), Width(shape.latent))
    arrived = Saved(name="dispatched", elements=sent, cut="experts", copies=shape.top_k, dropped_by=MOE)
    yield Permutation(name="dispatch", direction="dispatch", elements=sent, top_k=shape.top_k, saves=(arrived,))
    up = (inner, inner) if shape.gated else (inner,)
    yield routed(name="expert_up", inputs=Width(sent), outputs=up, sharding="column")
    yield nonlinearity(shape.width, gated=shape.gated, copies=shape.top_k, rerun_by=MOE)
    # What each expert gives is kept: the gradient of the router's weights needs it.
    given = Saved(name="expert output", elements=sent, cut="experts", copies=shape.top_k, dropped_by=MOE)
    yield routed(name="expert_down", inputs=inner, outputs=(Width(sent),), sharding="row", saves=(given,))
    summed = (Saved(name="combined", elements=sent),) if shape.latent else ()
    yield Permutation(name="combine", direction="combine", elements=sent, top_k=shape.top_k, saves=summed)
    if shape.latent:
        yield matmul("latent_up", Width(shape.latent), Width(hidden))


def _parameters(shape: ExpertsShape, hidden: int) -> Iterator[Parameter]:
    names, sent = shape.names, shape.latent or hidden
    inner, whole = Width(shape.width), Width(sent)
    for parameter in linear(names["router"], Width(hidden), Width(shape.num_experts), bias=shape.router_bias):
        yield parameter if parameter.role == "bias" else replace(parameter, role="router")
    if shape.latent:
        yield from linear(names["latent_down"], Width(hidden), whole)
        yield from linear(names["latent_up"], whole, Width(hidden))
    up = (inner, inner) if shape.gated else (inner,)
    yield _weight(shape, names["expert_up"], (whole,), up, tp_on_outputs=True)
    yield _weight(shape, names["expert_down"], (inner,), (whole,), tp_on_outputs=False)
    if shape.bias:
        num_up = sum(width.elements for width in up)
        experts = shape.num_experts
        up_bias, down_bias = f"{names['expert_up']}_bias", f"{names['expert_down']}_bias"
        yield Parameter(name=up_bias, shape=(experts, num_up), role="bias", tp_dim=1, pieces=up, ep_dim=0)
        yield Parameter(name=down_bias, shape=(experts, sent), role="bias", ep_dim=0)


def _weight(
    shape: ExpertsShape, name: str, inputs: tuple[Width, ...], outputs: tuple[Width, ...], *, tp_on_outputs: bool
) -> Parameter:
    """The weights of all experts as one tensor, as modules keep them for grouped products."""
    num_in, num_out = (sum(width.elements for width in side) for side in (inputs, outputs))
    sides = (num_in, num_out) if shape.transposed else (num_out, num_in)
    out_dim = 2 if shape.transposed else 1
    return Parameter(
        name=name,
        shape=(shape.num_experts, *sides),
        tp_dim=out_dim if tp_on_outputs else 3 - out_dim,
        pieces=outputs if tp_on_outputs else inputs,
        ep_dim=0,
    )
