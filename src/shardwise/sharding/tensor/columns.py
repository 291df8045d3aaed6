"""Linear layers cut by their outputs, and sets of them that read one tensor.

    x ── column ── what needs no other channel ── row ── sum over the ranks

Columns that read one tensor (query, key and value; gate and up) are computed together, so that what is gathered for
them is gathered once, and backward sums their input gradients here first, and then once over the ranks. That sum is
under way while the weight gradients are computed.
"""

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.ranks.collectives import Group
from shardwise.sharding.rng_tracker import RngTracker
from shardwise.sharding.tensor.communication import AllReduce, Chunk, Multiply, NoCommunication, SequenceShards
from shardwise.sharding.tensor.lazy_gather import LazyGather, SequenceLength
from shardwise.sharding.tensor.matmuls import computing_type, multiply, wants, weight_gradient


class ColumnSet:
    """Column layers that read the same tensor.

    The first that is called computes all of them; the others take what is theirs. One that is called with another
    tensor is computed alone. What is gathered and summed goes in `num_chunks`, or as many as its size is worth.
    """

    def __init__(self, group: Group, num_chunks: int | None = None) -> None:
        self.group, self.num_chunks = group, num_chunks
        #: Of a sequence of which the input is this rank's piece, which is gathered here.
        self.gathers: SequenceLength | None = None
        #: The gradient of the input is summed here. If not, whoever gave the input does it.
        self.reduces = True
        self.members: list[ColumnParallelLinear] = []
        self._ready: dict[int, Tensor] = {}
        self._of: weakref.ref[Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ColumnSet":
        twin = ColumnSet(self.group, self.num_chunks)
        twin.gathers, twin.reduces = self.gathers, self.reduces
        memo[id(self)] = twin
        twin.members = [copy.deepcopy(each, memo) for each in self.members]
        return twin

    def run(self, tensor: Tensor, asked: "ColumnParallelLinear") -> Tensor:
        if self._of is None or self._of() is not tensor or id(asked) not in self._ready:
            together = self.members if self._of is None or self._of() is not tensor else [asked]
            self._ready = dict(zip(map(id, together), self._compute(tensor, together), strict=True))
            self._of = weakref.ref(tensor)
        return self._ready.pop(id(asked))

    def _compute(self, tensor: Tensor, layers: "list[ColumnParallelLinear]") -> tuple[Tensor, ...]:
        weights: list[Tensor | None] = []
        for each in layers:
            weights += [each.weight, each.bias]
        transposed = tuple(each.is_transposed for each in layers)
        given, length = (tensor.piece, tensor.length) if isinstance(tensor, LazyGather) else (tensor, self.gathers)
        communication = self._communication(given.shape[:-1], length)
        return _Columns.apply(given, communication, transposed, *weights)  # type: ignore[no-untyped-call, no-any-return]

    def _communication(self, shape: torch.Size, length: SequenceLength | None) -> NoCommunication:
        if length is not None:
            return SequenceShards(length.whole_shape(shape), length.tokens, self.group, self.num_chunks)
        return AllReduce(shape, self.group, self.num_chunks) if self.reduces else NoCommunication(shape)


class ColumnParallelLinear(nn.Module):
    """This rank's outputs of a linear layer. `is_transposed`: its weight lies as (inputs, outputs)."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, together: ColumnSet, *, is_transposed: bool,
        rng: RngTracker | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.bias, self.is_transposed = weight, bias, is_transposed
        self.in_features, self.out_features = weight.shape if is_transposed else reversed(weight.shape)
        self.together, self.rng = together, rng
        together.members.append(self)

    def forward(self, tensor: Tensor) -> Tensor:
        result = self.together.run(tensor, self)
        if self.rng is not None and self.training:
            self.rng.enter(tensor.device)
        return result

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.together.group}"


class _Columns(torch.autograd.Function):
    """Several linear layers on one input: x, w1, b1, w2, b2, ... to y1, y2, ..."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, communication: NoCommunication, transposed: tuple[bool, ...], *weights: Tensor | None
    ) -> Any:
        kind = computing_type(tensor)
        given, ctx.kinds = tensor.to(kind), (tensor.dtype, [None if each is None else each.dtype for each in weights])
        matrices = [each.to(kind) for each in weights[::2] if each is not None]
        biases = [None if each is None else each.to(kind) for each in weights[1::2]]
        straight = [matrix if turned else matrix.t() for matrix, turned in zip(matrices, transposed, strict=True)]
        made = [communication.room(each.shape[1], given) for each in straight]
        ctx.chunks, arrived = [], []
        for chunk, rows in communication.receive(given):
            ctx.chunks.append(chunk)
            arrived.append(rows)
            for each, bias, into in zip(straight, biases, made, strict=True):
                multiply(rows, each, bias, chunk.of(into))
        ctx.save_for_backward(*arrived, *matrices)
        ctx.communication, ctx.transposed = communication, transposed
        ctx.are_tensors = (True, False, False, *(each is not None for each in weights))
        # Models write into them, which autograd forbids of views.
        return tuple(communication.whole(each).detach() for each in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ctx.chunks)
        arrived, matrices = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        laid = [None if each is None else ctx.communication.lay(each) for each in gradients]
        finish = None
        # The input gradient goes first: its sum over the ranks is under way while weight gradients are computed.
        if wants(ctx, 0):
            back = [matrix.t() if turned else matrix for matrix, turned in zip(matrices, ctx.transposed, strict=True)]
            finish = ctx.communication.send(back[0].shape[1], back[0], _input_gradient(laid, back))
        found: list[Tensor | None] = []
        for number, (gradient, turned) in enumerate(zip(laid, ctx.transposed, strict=True)):
            for which in range(2):
                kind = ctx.kinds[1][2 * number + which]
                if gradient is None or kind is None or not wants(ctx, 3 + 2 * number + which):
                    found.append(None)
                elif which:
                    found.append(gradient.sum((0, 1, 2)).to(kind))
                else:
                    pairs = ((rows, chunk.rows(gradient)) for chunk, rows in zip(ctx.chunks, arrived, strict=True))
                    found.append(weight_gradient(pairs, is_transposed=turned).to(kind))
        return None if finish is None else finish().to(ctx.kinds[0]), None, None, *found


def _input_gradient(gradients: list[Tensor | None], matrices: list[Tensor]) -> Multiply:
    """What computes the gradient of what the layers read: the sum of what comes back through each."""

    def multiply_all(chunk: Chunk, into: Tensor) -> None:
        is_first = True
        for gradient, matrix in zip(gradients, matrices, strict=True):
            if gradient is None:
                continue
            if is_first:
                multiply(chunk.rows(gradient), matrix, None, into)
            else:
                into.addmm_(chunk.rows(gradient), matrix)
            is_first = False
        if is_first:
            into.zero_()

    return multiply_all
