"""Linear layers cut by their inputs: each rank multiplies its own, and the results are summed over the ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.ranks.collectives import Group
from shardwise.sharding.rng_tracker import RngTracker
from shardwise.sharding.tensor.communication import AllReduce, Chunk, NoCommunication, SequenceShards
from shardwise.sharding.tensor.lazy_gather import SequenceLength
from shardwise.sharding.tensor.matmuls import computing_type, multiply, wants, weight_gradient


class RowParallelLinear(nn.Module):
    """This rank's inputs of a linear layer, summed over the ranks. The bias is added once, after the sum.

    The sum goes in `num_chunks`, or as many as its size is worth.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, *, is_transposed: bool,
        rng: RngTracker | None, num_chunks: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.bias, self.is_transposed = weight, bias, is_transposed
        self.in_features, self.out_features = weight.shape if is_transposed else reversed(weight.shape)
        self.group, self.rng, self.num_chunks = group, rng, num_chunks
        #: Of sequences of which each rank keeps its piece of the sum.
        self.scatters: SequenceLength | None = None

    def forward(self, tensor: Tensor) -> Tensor:
        if self.rng is not None:
            self.rng.leave(tensor.device)
        shape, how = tensor.shape[:-1], (self.group, self.num_chunks)
        communication = (
            AllReduce(shape, *how) if self.scatters is None else SequenceShards(shape, self.scatters.tokens, *how)
        )
        # A bias inside of the sum would be added once by each rank.
        whole: Tensor = _Rows.apply(tensor, self.weight, communication, self.is_transposed)  # type: ignore[no-untyped-call]
        return whole if self.bias is None else whole + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.group}"


class _Rows(torch.autograd.Function):
    """x and w to the sum of all ranks' x @ w."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, weight: Tensor, communication: NoCommunication, is_transposed: bool
    ) -> Tensor:
        kind = computing_type(tensor)
        given, matrix = tensor.to(kind), weight.to(kind)
        ctx.save_for_backward(given, matrix)
        ctx.communication, ctx.is_transposed, ctx.kinds = communication, is_transposed, (tensor.dtype, weight.dtype)
        ctx.are_tensors, ctx.left = (True, True), None
        straight, laid = matrix if is_transposed else matrix.t(), communication.lay(given)
        width = straight.shape[1]
        finish = communication.send(width, given, lambda chunk, rows: multiply(chunk.rows(laid), straight, None, rows))
        return finish().detach()  # Models write into it, which autograd forbids of a view.

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, matrix = ctx.saved_tensors
        wants_input, wants_weight = wants(ctx, 0), wants(ctx, 1)
        if wants_input or ctx.left is None or ctx.left[0] is not gradient:
            back = matrix.t() if ctx.is_transposed else matrix
            found, arrived = _receive(ctx.communication, gradient, given, back if wants_input else None)
        else:  # The other half of a backward, for which the first has left what it received.
            found, (_, arrived) = None, ctx.left
        later = ctx.needs_input_grad[1] and not wants_weight
        ctx.left = (gradient, arrived) if later else None
        turned: Tensor | None = None
        if wants_weight:
            laid = ctx.communication.lay(given)
            pairs = ((chunk.rows(laid), rows) for chunk, rows in arrived)
            turned = weight_gradient(pairs, is_transposed=ctx.is_transposed).to(ctx.kinds[1])
        return None if found is None else found.to(ctx.kinds[0]), turned, None, None


def _receive(
    communication: NoCommunication, gradient: Tensor, given: Tensor, matrix: Tensor | None
) -> tuple[Tensor | None, list[tuple[Chunk, Tensor]]]:
    """The gradient of what a layer read, if there is a matrix for it, and the rows of all gradients that arrived."""
    laid = None if matrix is None else communication.room(matrix.shape[1], given)
    arrived = []
    for chunk, rows in communication.receive(gradient):
        arrived.append((chunk, rows))
        if laid is not None and matrix is not None:
            multiply(rows, matrix, None, chunk.of(laid))
    return None if laid is None else communication.whole(laid), arrived
