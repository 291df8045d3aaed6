"""Normalisation: what it computes, and what it keeps."""

from shardwise.model.assembly.part import Part
from shardwise.model.model import Parameter
from shardwise.model.operations import Norm, Saved
from shardwise.model.shape import NormShape
from shardwise.model.share import Cut
from shardwise.model.traffic import FLOAT32


def norm(name: str, elements: int, shape: NormShape, *, keeps_output: bool = True, rows: int | None = None) -> Part:
    """A norm over the hidden width. Its output is kept if a matmul reads it."""
    saves = kept_input(elements, shape, rows=rows)
    if keeps_output:
        saves += (Saved(name="norm output", elements=elements, cut="columns", rows=rows, dropped_by=("norm",)),)
    operation = Norm(name=name, kind=shape.kind, elements=elements, rows=rows, saves=saves, rerun_by=("norm",))
    return Part(operations=(operation,), parameters=norm_parameters(name, elements, shape))


def kept_input(elements: int, shape: NormShape, *, rows: int | None = None, cut: Cut = "sequence") -> tuple[Saved, ...]:
    """What a norm's own backward needs: its input. Statistics of a row are left out, as everybody does.

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
