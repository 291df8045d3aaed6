"""What stands between attentions: an MLP with a gate or without, or a mixture of them.

A mixture is a router, the way to the experts, their MLPs, the way back, and the experts that all meet.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from shardwise.model.assembly.part import Part, joined, linear, matmul
from shardwise.model.model import Parameter
from shardwise.model.operations import Elementwise, Matmul, Moves, Operation, Permutation, Router, Saved, Width
from shardwise.model.shape import ExpertsShape, MlpShape
from shardwise.model.traffic import FLOAT32

MLP = ("mlp",)
MOE = ("moe",)


def mlp(shape: MlpShape, hidden: int, *, rows: int | None = None) -> Part:
    """Return the part from the normalised input to the residual."""
    return Part(
        operations=tuple(_operations(shape, hidden, rows)),
        parameters=tuple(_parameters(shape, hidden)),
        reduces=True,
    )


def nonlinearity(
    width: int,
    *,
    gated: bool,
    copies: int = 1,
    rows: int | None = None,
    rerun_by: tuple[str, ...] = MLP,
) -> Elementwise:
    """Return the operation between up and down. It keeps its input and its output, which down reads.

    With a gate, plain torch launches two kernels, and keeps the activated gate too.
    """
    again = ("activation", *rerun_by)
    kept = partial(Saved, cut="tp", copies=copies, rows=rows)
    saves = (
        kept(name="up", elements=width * (1 + gated), dropped_by=rerun_by),
        kept(name="activated", elements=width, dropped_by=again),
        kept(name="activated gate", elements=width, when="unfused", dropped_by=again),
    )
    plain = Moves(width, width, 2 * width, width)
    fused = Moves(2 * width, width, 3 * width, 2 * width) if gated else plain
    unfused = Moves(3 * width, 2 * width, 6 * width, 3 * width) if gated else plain
    return Elementwise(
        name="nonlinearity",
        fused=fused,
        unfused=unfused,
        cut="tp",
        copies=copies,
        rows=rows,
        saves=saves if gated else saves[:2],
        rerun_by=again,
    )


def _operations(shape: MlpShape, hidden: int, rows: int | None) -> Iterator[Operation]:
    inner = Width(shape.width)
    up = (inner, inner) if shape.gated else (inner,)
    yield matmul("up", Width(hidden), up, sharding="column", bias=shape.bias, rows=rows, rerun_by=MLP)
    yield nonlinearity(shape.width, gated=shape.gated, rows=rows)
    yield matmul("down", inner, Width(hidden), sharding="row", bias=shape.bias, rows=rows, rerun_by=MLP)


def _parameters(shape: MlpShape, hidden: int) -> Iterator[Parameter]:
    """Return weights and biases, with gate and up as one if the module stores them so."""
    names, inner = shape.names, Width(shape.width)
    if "gate_up" in names:
        yield from linear(names["gate_up"], Width(hidden), (inner, inner), sharding="column", bias=shape.bias)
    else:
        for part in ("gate", "up") if shape.gated else ("up",):
            yield from linear(
                names[part], Width(hidden), inner, sharding="column", bias=shape.bias, transposed=shape.transposed
            )
    yield from linear(names["down"], inner, Width(hidden), sharding="row", bias=shape.bias, transposed=shape.transposed)


def experts(shape: ExpertsShape, hidden: int) -> Part:
    """Return the part from the normalised input to the residual."""
    routed = Part(
        operations=tuple(_expert_operations(shape, hidden)),
        parameters=tuple(_expert_parameters(shape, hidden)),
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


def _expert_operations(shape: ExpertsShape, hidden: int) -> Iterator[Operation]:
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


def _expert_parameters(shape: ExpertsShape, hidden: int) -> Iterator[Parameter]:
    names, sent = shape.names, shape.latent or hidden
    inner, whole = Width(shape.width), Width(sent)
    for parameter in linear(names["router"], Width(hidden), Width(shape.num_experts), bias=shape.router_bias):
        yield parameter if parameter.role == "bias" else replace(parameter, role="router")
    if shape.latent:
        yield from linear(names["latent_down"], Width(hidden), whole)
        yield from linear(names["latent_up"], whole, Width(hidden))
    up = (inner, inner) if shape.gated else (inner,)
    yield _expert_weight(shape, names["expert_up"], (whole,), up, tp_on_outputs=True)
    yield _expert_weight(shape, names["expert_down"], (inner,), (whole,), tp_on_outputs=False)
    if shape.bias:
        num_up = sum(width.elements for width in up)
        experts = shape.num_experts
        up_bias, down_bias = f"{names['expert_up']}_bias", f"{names['expert_down']}_bias"
        yield Parameter(name=up_bias, shape=(experts, num_up), role="bias", tp_dim=1, pieces=up, ep_dim=0)
        yield Parameter(name=down_bias, shape=(experts, sent), role="bias", ep_dim=0)


def _expert_weight(
    shape: ExpertsShape, name: str, inputs: tuple[Width, ...], outputs: tuple[Width, ...], *, tp_on_outputs: bool
) -> Parameter:
    """Return the weights of all experts as one tensor, as modules store them for grouped products."""
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
