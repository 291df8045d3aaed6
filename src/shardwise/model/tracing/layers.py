"""Pieces of a run made into blocks: which are equal, whose parameters are whose, what is tied."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from shardwise.model.model import Block, Parameter
from shardwise.model.operations import Elementwise, Moves, Operation, Saved
from shardwise.model.tracing.recorder import Moved, Segment, key_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A run: its pieces, the parameters it had by name, the module, samples of the batch, bytes of an element."""

    segments: list[Segment]
    parameters: dict[str, Tensor]
    module: nn.Module
    num_samples: int
    width: int

    def each(self, num_bytes: int) -> int:
        """Elements of one sample, from bytes of the batch."""
        return -(-num_bytes // (self.num_samples * self.width))


def gather(segments: list[Segment]) -> list[Segment]:
    """Return pieces with work; work between two items of a list is added to the item before it."""
    kept: list[Segment] = []
    busy = [segment for segment in segments if not segment.is_empty]
    for index, segment in enumerate(busy):
        after = busy[index + 1].path if index + 1 < len(busy) else None
        if segment.path is None and kept and kept[-1].path and after and _stack(kept[-1].path) == _stack(after):
            _merge(kept[-1], segment)
        else:
            kept.append(segment)
    return kept


def blocks_of(traced: Traced) -> tuple[tuple[Block, ...], tuple[tuple[str, ...], ...]]:
    """Return the blocks in order, equal ones as one object, and the tied parameters."""
    named, ties = _assign(traced)
    stacked = _in_order(traced.segments, named)
    kinds: dict[object, Block] = {}
    labels: Counter[str] = Counter()
    blocks = []
    for index, (segment, names) in enumerate(zip(traced.segments, named, strict=True)):
        stack = _stack(segment.path) if segment.path and _stack(segment.path) in stacked else ""
        prefix = f"{segment.path}." if stack else ""
        parameters = tuple(_parameter(name, prefix, segment, traced) for name in names)
        operations = (*segment.operations, *_rest(segment, traced))
        sizes = _ends(traced, index)
        signature = (stack, operations, parameters, sizes)
        if signature not in kinds:
            label = _label(segment, traced, index)
            labels[label] += 1
            kind = label if labels[label] == 1 else f"{label} ({labels[label]})"
            kinds[signature] = Block(
                kind=kind,
                stack=stack,
                operations=operations,
                parameters=parameters,
                input_elements=sizes[0],
                output_elements=sizes[1],
                rows=1,
            )
        blocks.append(kinds[signature])
    return tuple(blocks), ties


def _stack(path: str) -> str:
    """Return the list that an item is in: `model.layers` of `model.layers.7`; empty if it is in none."""
    above, _, last = path.rpartition(".")
    return above if last.isdecimal() else ""


def _merge(into: Segment, glue: Segment) -> None:
    into.operations += glue.operations
    for mine, theirs in ((into.forward, glue.forward), (into.backward, glue.backward)):
        mine.read += theirs.read
        mine.written += theirs.written
        mine.inputs.update(theirs.inputs)
        mine.outputs.update(theirs.outputs)
        mine.wanted |= theirs.wanted
    for dtype, size in glue.saved.items():
        into.saved[dtype] = into.saved.get(dtype, 0) + size
    into.parameters.update(glue.parameters)
    into.experts |= glue.experts


def _assign(traced: Traced) -> tuple[list[list[str]], tuple[tuple[str, ...], ...]]:
    """Return the parameter names of each piece. A tensor that several pieces use has a name in each."""
    aliases: dict[int, list[str]] = {}
    for name, tensor in traced.parameters.items():
        aliases.setdefault(key_of(tensor), []).append(name)
    given: dict[int, list[str]] = {key: [] for key in aliases}
    named: list[list[str]] = []
    for segment in traced.segments:
        names = []
        for key in segment.parameters:
            free = [name for name in aliases[key] if name not in given[key]]
            own = [name for name in free if segment.path and name.startswith(f"{segment.path}.")]
            if own or free or not given[key]:
                names.append((own or free)[0])
            else:  # One tensor under one name, used again: the use is named after where it is.
                names.append(f"{segment.path or 'between'}.again.{given[key][0]}")
            given[key].append(names[-1])
        named.append(names)
    # What the run never touched stays with the block it is in, else with the first piece.
    for key, used in given.items():
        if not used:
            name = aliases[key][0]
            paths = [
                index for index, each in enumerate(traced.segments) if each.path and name.startswith(f"{each.path}.")
            ]
            named[paths[0] if paths else 0].append(name)
    return named, tuple(tuple(names) for names in given.values() if len(names) > 1)


def _in_order(segments: list[Segment], named: list[list[str]]) -> set[str]:
    """Return the lists whose items ran once each and in order, with only their own parameters."""
    indices: dict[str, list[int]] = {}
    strange = set()
    for segment, names in zip(segments, named, strict=True):
        if segment.path and (stack := _stack(segment.path)):
            indices.setdefault(stack, []).append(int(segment.path.rpartition(".")[2]))
            if not all(name.startswith(f"{segment.path}.") for name in names):
                strange.add(stack)
    return {stack for stack, seen in indices.items() if seen == list(range(len(seen)))} - strange


def _parameter(name: str, prefix: str, segment: Segment, traced: Traced) -> Parameter:
    tensor = traced.parameters.get(name)
    if tensor is None:  # A second use of a tensor, named after where it is.
        tensor = traced.parameters[name.partition(".again.")[2]]
    return Parameter(
        name=name.removeprefix(prefix),
        shape=tuple(tensor.shape),
        role=_role(name, tensor, traced.module),
        ep_dim=0 if key_of(tensor) in segment.experts else None,
        trains=tensor.requires_grad,
    )


def _role(name: str, tensor: Tensor, module: nn.Module) -> Literal["weight", "bias", "norm", "embedding", "other"]:
    owner, _, leaf = name.rpartition(".")
    try:
        holder = module.get_submodule(owner)
    except AttributeError:
        holder = module
    if isinstance(holder, nn.Embedding):
        return "embedding"
    if tensor.dim() >= 2:
        return "weight"
    if "Norm" in type(holder).__name__:
        return "norm"
    return "bias" if leaf.endswith("bias") else "other"


def _rest(segment: Segment, traced: Traced) -> Iterator[Operation]:
    """Yield all kernels other than products as one operation, which also keeps their saved tensors."""
    saves = tuple(_kept(dtype, size, traced) for dtype, size in segment.saved.items())
    forward, backward = segment.forward, segment.backward
    if saves or forward.read or forward.written or backward.read or backward.written:
        yield Elementwise(
            name="other kernels",
            fused=_moves(traced, forward, backward, fused=True),
            unfused=_moves(traced, forward, backward, fused=False),
            cut="whole",
            rows=1,
            saves=saves,
        )


def _moves(traced: Traced, forward: Moved, backward: Moved, *, fused: bool) -> Moves:
    if fused:
        sizes = (forward.fused_read, forward.fused_written, backward.fused_read, backward.fused_written)
    else:
        sizes = (forward.read, forward.written, backward.read, backward.written)
    return Moves(*(traced.each(size) for size in sizes))


def _kept(dtype: torch.dtype, size: int, traced: Traced) -> Saved:
    """Return tensors of one dtype. Those of the parameters' own dtype are as wide as activations will be."""
    own = dtype.is_floating_point and dtype.itemsize == traced.width
    elements = -(-size // (traced.num_samples * dtype.itemsize))
    return Saved(
        name=str(dtype).removeprefix("torch."),
        elements=elements,
        cut="whole",
        rows=1,
        width=None if own else dtype.itemsize,
    )


def _ends(traced: Traced, index: int) -> tuple[int, int]:
    """Elements of one sample that come into a piece and go out of it. Between blocks: those of the neighbours."""
    segments = traced.segments
    segment = segments[index]
    if segment.path is not None:
        return -(-segment.input_elements // traced.num_samples), -(-segment.output_elements // traced.num_samples)
    before = segments[index - 1].output_elements if index else 0
    after = segments[index + 1].input_elements if index + 1 < len(segments) else 0
    return -(-before // traced.num_samples), -(-after // traced.num_samples)


def _label(segment: Segment, traced: Traced, index: int) -> str:
    """Return the class of a block; otherwise the name of a piece."""
    if segment.path is not None:
        return type(traced.module.get_submodule(segment.path)).__name__
    return "before" if index == 0 else "after" if index == len(traced.segments) - 1 else "between"
