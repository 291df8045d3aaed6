"""Assemble the module's output for a whole batch, on every rank, from the parts that the processes computed.

microbatch ── output of a last stage ── words of all ranks (tp) ── sent to all ── tokens of all ranks (cp)
                                                                                    │
batch      ── rows of all microbatches and replicas (dp), without those that were added to divide them

A batch may have any number of rows: its last row is repeated until all microbatches are full, and the outputs of the
added rows are dropped. In evaluation mode rows must not influence each other: a few rows of the first batch of each
kind are computed together and in two parts, and compared (`stages/rows_apart.py`).
"""

import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.engine.make_execution import Execution
from shardwise.engine.parts import Parts
from shardwise.engine.told_outputs import ToldOutputs
from shardwise.errors import ShardwiseError
from shardwise.execution.executor import Executor
from shardwise.sharding.context.sequence_shards import LocalBatch
from shardwise.sharding.tensor.lazy_gather import LazyGather
from shardwise.sharding.tensor.vocabulary import VocabParallelLogits
from shardwise.sharding.zigzag import zigzag_unshard
from shardwise.stages.batch import length_of, padded, shapes_of
from shardwise.stages.outputs import Joint
from shardwise.stages.rows_apart import Counting, LabelsCounted, Returned, Way
from shardwise.stages.split.outline import open_dataclasses
from shardwise.stages.stage import Batch
from shardwise.torch_private import pytree

#: Values other than tensors that an output may have.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class _Hole:
    """A placeholder for a tensor in an output."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Place(NamedTuple):
    """The origin of an output: its replica, microbatch and context parallel rank."""

    replica: int
    microbatch: int
    piece: int


class Given(NamedTuple):
    """A batch to predict, with rows added; this process's microbatches of it; and the number of real rows."""

    batch: Batch
    microbatches: list[Batch]
    num_rows: int


class Predictions:
    """The predictions of one engine. Every process calls this alike."""

    def __init__(self, parts: Parts, execution: Execution) -> None:
        self._parts, self._execution = parts, execution
        self._executor: Executor | None = None
        self._ways = ToldOutputs(parts)

    @property
    def _num_parts(self) -> int:
        return self._parts.plan.microbatches * (1 if self._parts.options.is_local else self._parts.plan.dp)

    def run(self, batch: Batch, *, shapes_by_data: bool) -> Any:
        """Return the output for the whole batch."""

        def compute(some: Batch, counting: Counting | None) -> list[Returned]:
            return self._parts_of(self._cut(some), counting, shapes_by_data=shapes_by_data)

        rule = self._execution.batches.rule
        ways = self._ways.ways_of(batch, rule.look(batch), compute, num_parts=self._num_parts)
        given = self._cut(batch)
        counting = Counting() if {"labels", "even"} & {*ways.values()} else None
        return self._join(self._parts_of(given, counting, shapes_by_data=shapes_by_data), given, ways)

    def _parts_of(self, given: "Given", counting: Counting | None, *, shapes_by_data: bool) -> list[Returned]:
        """Return the outputs of all microbatches of all replicas, in the order of their rows."""
        first = self._parts.wires.mesh.coordinates.get("dp", 0) * self._parts.plan.microbatches
        for interpreter in self.executor.interpreters:
            interpreter.counting = lambda number: nullcontext() if counting is None else counting(first + number)
        signature = None if shapes_by_data else ("predict", shapes_of(given.batch))
        self.executor.run(given.microbatches, signature=signature)
        return self._joined(given, counting)

    @property
    def executor(self) -> Executor:
        """The executor that runs forwards and keeps the module's outputs. It is made on first use."""
        if self._executor is None:
            self._executor = self._execution.make_predictor()
        return self._executor

    def _cut(self, batch: Batch) -> Given:
        """Return this process's part of a batch."""
        batches = self._execution.batches
        seen = batches.rule.look(batch)
        if not seen.length:
            raise ShardwiseError("the batch has no row", remedy="a batch of at least 1")
        whole = padded(batch, seen, -(-seen.length // self._num_parts) * self._num_parts)
        return Given(whole, batches.cut(whole, "prediction", predicts=True), seen.length)

    def _joined(self, given: Given, counting: Counting | None) -> list[Returned]:
        """Return the outputs of all microbatches that were run last, with all of their words and tokens."""
        mine: dict[_Place, Any] = {}
        counted: dict[_Place, LabelsCounted] = {}
        axes = self._parts.wires.mesh.coordinates
        for interpreter in self.executor.interpreters:
            for number, output in sorted(interpreter.outputs.items()):
                open_dataclasses(output)
                place = _Place(axes.get("dp", 0), number, axes.get("cp", 0))
                mine[place] = pytree.tree_map(_whole, output)
                if counting is not None:
                    counted[place] = counting.of(place.replica * self._parts.plan.microbatches + number)
            interpreter.outputs.clear()
        outputs = mine if self._parts.wires.watch is None else self._told(mine, has_first=axes["tp"] == 0)
        if self._parts.wires.watch is not None and counting is not None:
            counted = {place: each for told in self._parts.wires.gather(counted) for place, each in told.items()}
        if self._parts.options.is_local:  # Other replicas have their own batches.
            outputs = {place: each for place, each in outputs.items() if place.replica == axes["dp"]}
        made = []
        for place in sorted(outputs):
            if place.piece == 0:
                pieces = [outputs[place._replace(piece=piece)] for piece in range(self._parts.plan.cp)]
                output = pieces[0] if len(pieces) == 1 else _join_tokens(pieces, given.microbatches[0])
                length = length_of(given.batch) // self._num_parts
                made.append(Returned(output, length, counted.get(place, LabelsCounted())))
        return made

    def _told(self, mine: dict[_Place, Any], *, has_first: bool) -> dict[_Place, Any]:
        """Return the outputs of all processes. Ranks of a tensor parallel group have the same, and the first sends
        them."""
        wires = self._parts.wires
        found: dict[_Place, Any] = {}
        told = wires.gather({place: _outline(each) for place, each in mine.items()} if has_first else {})
        for source, outlines in enumerate(told):
            for place, outline in outlines.items():
                open_dataclasses(outline, _Hole)  # Registered here too: this process may have computed no output.
                holes, tree = pytree.tree_flatten(outline)
                given = iter(pytree.tree_leaves(mine[place])) if source == wires.rank else iter(holes)
                leaves = []
                for hole, each in zip(holes, given, strict=True):
                    if isinstance(hole, _Hole):
                        # Over the host, and as bytes: the group of all ranks may use gloo, which supports few dtypes.
                        tensor = each.detach().cpu().contiguous() if isinstance(each, Tensor) else _empty(hole)
                        if tensor.numel():
                            wires.broadcast(tensor.reshape(-1).view(torch.uint8), source, "the outputs of a batch")
                        leaves.append(tensor)
                    else:
                        leaves.append(hole)
                found[place] = pytree.tree_unflatten(leaves, tree)
        return found

    def _join(self, made: Sequence[Returned], given: Given, ways: Mapping[int, Way]) -> Any:
        """Join the outputs of replicas and microbatches to one."""
        by_rows, length = [each.output for each in made], length_of(given.batch)
        if len(by_rows) > 1:
            _check_plain(by_rows)
        joint = Joint(by_rows, [each.num_rows for each in made], ways, [each.counted for each in made])
        tensors = {number: joint.joined(number, self._parts.device) for number in joint.tensors}
        if given.num_rows < length:
            for number, leaf in joint.tensors.items():
                if leaf.how not in ("rows", "same"):
                    raise ShardwiseError(
                        f"the module returns one number for a microbatch (number {number + 1} of its output), and the"
                        f" batch of {given.num_rows} rows does not divide into {len(by_rows)} equal ones",
                        remedy=f"a batch of {length}; or a batch without labels, if the number is a loss",
                    )
                if leaf.how == "rows":
                    tensors[number] = tensors[number][: given.num_rows]
        return joint.filled(tensors)


def _whole(leaf: Any) -> Any:
    """Return a leaf of an output with all of its words and tokens."""
    return leaf.whole() if isinstance(leaf, (VocabParallelLogits, LazyGather)) else leaf


def _outline(output: Any) -> Any:
    """Return an output without its tensors, to be sent; refuse one that cannot be sent."""
    outline = pytree.tree_map(lambda e: _Hole(tuple(e.shape), e.dtype) if isinstance(e, Tensor) else e, output)
    _check_plain([output])
    try:
        pickle.dumps(outline)
    except Exception as error:
        raise ShardwiseError(
            f"the module returns a {type(output).__name__}, which cannot be sent to other ranks: {error}",
            remedy="a class at the top of a file, a tuple, a list or a dictionary",
        ) from None
    return outline


def _empty(hole: _Hole) -> Tensor:
    return torch.empty(hole.shape, dtype=hole.dtype)


def _check_plain(outputs: Sequence[Any]) -> None:
    """Refuse what is neither a tensor nor a plain value, or is another value for each microbatch."""
    every = [[each for each in pytree.tree_leaves(output) if not isinstance(each, Tensor)] for output in outputs]
    for each in every[0]:
        if not isinstance(each, _PLAIN):
            raise ShardwiseError(
                f"the module returns a {type(each).__name__}, and what is inside it cannot be joined from parts",
                remedy="tensors, plain values, and tuples, lists, dictionaries or dataclasses of these",
            )
    for others in every[1:]:
        if len(others) == len(every[0]) and others != every[0]:
            one, other = next((a, b) for a, b in zip(every[0], others, strict=True) if a != b)
            raise ShardwiseError(
                f"the module returns {one!r} for one microbatch and {other!r} for another, and no tensor: which is the"
                " batch's is not known",
                remedy="a tensor with a row for each of the batch, or microbatches=1 and dp=1",
            )


def _join_tokens(pieces: Sequence[Any], microbatch: Batch) -> Any:
    """Join the outputs of ranks with parts of the tokens to one."""
    assert isinstance(microbatch, LocalBatch), "it was cut for cp"
    tokens, num_ranks = microbatch.tokens, len(pieces)
    every = [pytree.tree_flatten(each) for each in pieces]

    def join(parts: Sequence[Any]) -> Any:
        first = parts[0]
        if not isinstance(first, Tensor):
            return first
        if first.dim() > 1 and first.shape[1] == tokens.length // num_ranks:
            return zigzag_unshard(parts, 1)[:, : tokens.num_real]
        if all(torch.equal(first, each) for each in parts[1:]):
            return first
        raise ShardwiseError(
            f"the module returns a tensor of shape {tuple(first.shape)}, which under cp={num_ranks} is of each rank's"
            f" {tokens.length // num_ranks} tokens, and they are not its second dim: it cannot be joined",
            remedy="an output of [batch, tokens, ...], or cp=1; without labels in the batch, if it is a loss",
        )

    leaves = [join(parts) for parts in zip(*(leaves for leaves, _ in every), strict=True)]
    return pytree.tree_unflatten(leaves, every[0][1])
