"""What a builder gives back: operations in order, the parameters that they use, and what decoding keeps.

And what several of them are made of: projections, norms, residual sums.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardwise.model.model import Block, Cache, Parameter
from shardwise.model.operations import Elementwise, Matmul, Moves, Norm, Operation, Saved, Sharding, Width
from shardwise.model.shape import NormShape
from shardwise.model.share import Cut
from shardwise.model.traffic import FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a block. `reduces` says that its output is summed over tensor parallel ranks."""

    operations: tuple[Operation, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    cache: Cache | None = None
    reduces: bool = False

    def block(self, kind: str, **more: Any) -> Block:
        """Return this part alone as a block, with further arguments of `Block`."""
        return Block(kind=kind, operations=self.operations, parameters=self.parameters, **more)


def joined(parts: Iterable[Part]) -> Part:
    """Return several parts, one after the other."""
    parts = list(parts)
    caches = [part.cache for part in parts if part.cache is not None]
    assert len(caches) <= 1, "a block has one mixer that decoding keeps something of"
    return Part(
        operations=tuple(operation for part in parts for operation in part.operations),
        parameters=tuple(parameter for part in parts for parameter in part.parameters),
        cache=caches[0] if caches else None,
        reduces=any(part.reduces for part in parts),
    )


def linear(
    name: str,
    inputs: Width,
    outputs: tuple[Width, ...] | Width,
    *,
    sharding: Sharding = "none",
    bias: bool = False,
    transposed: bool = False,
) -> tuple[Parameter, ...]:
    """Return the parameters of a projection, or of several that are stored as one: a weight, stored as outputs x inputs
    unless `transposed`, and perhaps a bias."""
    outputs = (outputs,) if isinstance(outputs, Width) else outputs
    num_outputs = sum(width.elements for width in outputs)
    out_dim = 1 if transposed else 0
    shape = (inputs.elements, num_outputs) if transposed else (num_outputs, inputs.elements)
    tp_dim = {"column": out_dim, "row": 1 - out_dim, "none": None}[sharding]
    pieces = {"column": outputs, "row": (inputs,), "none": ()}[sharding]
    weight = Parameter(name=f"{name}.weight", shape=shape, tp_dim=tp_dim, pieces=pieces)
    if not bias:
        return (weight,)
    if sharding != "column":
        return weight, Parameter(name=f"{name}.bias", shape=(num_outputs,), role="bias")
    return weight, Parameter(name=f"{name}.bias", shape=(num_outputs,), role="bias", tp_dim=0, pieces=outputs)


def residual(hidden: int, *, dropout: bool, num_added: int = 1, rows: int | None = None) -> Elementwise:
    """Return the sum of a layer's input and the output of its sublayers, with dropout on the latter."""
    read = hidden * (1 + num_added)
    added = Moves(read, hidden, read, hidden)
    dropped = Moves(*(moved + hidden * num_added * dropout for moved in added))
    mask = Saved(name="dropout mask", elements=hidden * num_added, width=1, rows=rows)
    return Elementwise(name="residual", fused=added, unfused=dropped, rows=rows, saves=(mask,) if dropout else ())


def matmul(
    name: str,
    inputs: Width,
    outputs: tuple[Width, ...] | Width,
    *,
    sharding: Sharding = "none",
    bias: bool = False,
    rows: int | None = None,
    saves: tuple[Saved, ...] = (),
    rerun_by: tuple[str, ...] = (),
) -> Matmul:
    """Return a projection that is applied to every row."""
    return Matmul(
        name=name,
        inputs=inputs,
        outputs=(outputs,) if isinstance(outputs, Width) else outputs,
        sharding=sharding,
        bias=bias,
        rows=rows,
        saves=saves,
        rerun_by=rerun_by,
    )


def norm(name: str, elements: int, shape: NormShape, *, keeps_output: bool = True, rows: int | None = None) -> Part:
    """Return a norm over the hidden width. Its output is kept if a matmul reads it."""
    saves = kept_input(elements, shape, rows=rows)
    if keeps_output:
        saves += (Saved(name="norm output", elements=elements, cut="columns", rows=rows, dropped_by=("norm",)),)
    operation = Norm(name=name, kind=shape.kind, elements=elements, rows=rows, saves=saves, rerun_by=("norm",))
    return Part(operations=(operation,), parameters=norm_parameters(name, elements, shape))


def kept_input(elements: int, shape: NormShape, *, rows: int | None = None, cut: Cut = "sequence") -> tuple[Saved, ...]:
    """Return what a norm's backward needs: its input. Row statistics are left out, as is usual.

    Plain torch has no fused kernel for the root mean square as Hugging Face defines it: a copy of the input in float32
    is kept instead, and the normalised input in the activations' own type.
    """
    if shape.kind == "layer":
        return (Saved(name="norm input", elements=elements, cut=cut, rows=rows),)
    return (
        Saved(name="norm input", elements=elements, cut=cut, rows=rows, when="fused"),
        Saved(name="norm input in float32", elements=elements, cut=cut, rows=rows, width=FLOAT32, when="unfused"),
        Saved(name="normalised input", elements=elements, cut=cut, rows=rows, when="unfused"),
    )


def norm_parameters(name: str, elements: int, shape: NormShape) -> tuple[Parameter, ...]:
    """Weight and, if there is one, bias."""
    weight = Parameter(name=f"{name}.weight", shape=(elements,), role="norm")
    bias = Parameter(name=f"{name}.bias", shape=(elements,), role="norm")
    return (weight, bias) if shape.bias else (weight,)
