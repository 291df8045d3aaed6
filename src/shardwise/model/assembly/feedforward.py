"""The MLP of a layer: up, nonlinearity, down, with a gate or without."""

from collections.abc import Iterator
from functools import partial

from shardwise.model.assembly.part import Part, linear, matmul
from shardwise.model.model import Parameter
from shardwise.model.operations import Elementwise, Moves, Operation, Saved, Width
from shardwise.model.shape import MlpShape

MLP = ("mlp",)


def mlp(shape: MlpShape, hidden: int, *, rows: int | None = None) -> Part:
    """From the normalised input to what is added to the residual."""
    return Part(
        operations=tuple(_operations(shape, hidden, rows)),
        parameters=tuple(mlp_parameters(shape, hidden)),
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
    """What stands between up and down. It keeps its input and its output, which down reads.

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


def mlp_parameters(shape: MlpShape, hidden: int) -> Iterator[Parameter]:
    """Weights and biases, with gate and up as one where the module keeps them so."""
    names, inner = shape.names, Width(shape.width)
    if "gate_up" in names:
        yield from linear(names["gate_up"], Width(hidden), (inner, inner), sharding="column", bias=shape.bias)
    else:
        for part in ("gate", "up") if shape.gated else ("up",):
            yield from linear(
                names[part], Width(hidden), inner, sharding="column", bias=shape.bias, transposed=shape.transposed
            )
    yield from linear(names["down"], inner, Width(hidden), sharding="row", bias=shape.bias, transposed=shape.transposed)
