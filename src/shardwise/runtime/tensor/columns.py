"""Linear layers cut by their outputs, and linear layers cut by their inputs.

    x ── column ── what needs no other channel ── row ── sum over the ranks

Columns that read one tensor (query, key and value; gate and up) are computed together, so that backward sums their
input gradients here first, and then once over the ranks. That sum is under way while the weight gradients are computed.
"""

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.runtime.collectives import Group, gather, start_all_reduce, sum_over, sum_scatter
from shardwise.runtime.tensor.streams import Streams


class ColumnSet:
    """Column layers that read the same tensor.

    The first that is called computes all of them; the others take what is theirs. One that is called with another
    tensor is computed alone.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        #: The input is this rank's piece of a sequence, and is gathered here.
        self.gathers = False
        #: The gradient of the input is summed here. If not, whoever gave the input does it.
        self.reduces = True
        self.members: list[ColumnLinear] = []
        self._ready: dict[int, Tensor] = {}
        self._of: weakref.ref[Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ColumnSet":
        twin = ColumnSet(self.group)
        twin.gathers, twin.reduces = self.gathers, self.reduces
        memo[id(self)] = twin
        twin.members = [copy.deepcopy(each, memo) for each in self.members]
        return twin

    def run(self, tensor: Tensor, asked: "ColumnLinear") -> Tensor:
        if self._of is None or self._of() is not tensor or id(asked) not in self._ready:
            together = self.members if self._of is None or self._of() is not tensor else [asked]
            whole = gather(tensor, self.group, sequence_dim(tensor), used_alike=False) if self.gathers else tensor
            self._ready = dict(zip(map(id, together), self._compute(whole, together), strict=True))
            self._of = weakref.ref(tensor)
        return self._ready.pop(id(asked))

    def _compute(self, tensor: Tensor, layers: "list[ColumnLinear]") -> tuple[Tensor, ...]:
        weights: list[Tensor | None] = []
        for each in layers:
            weights += [each.weight, each.bias]
        transposed = tuple(each.is_transposed for each in layers)
        group = self.group if self.reduces and not self.gathers else Group()
        return _Columns.apply(tensor, group, transposed, *weights)  # type: ignore[no-untyped-call, no-any-return]


class ColumnLinear(nn.Module):
    """This rank's outputs of a linear layer. `is_transposed`: its weight lies as (inputs, outputs)."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, together: ColumnSet, *, is_transposed: bool,
        streams: Streams | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.bias, self.is_transposed = weight, bias, is_transposed
        self.in_features, self.out_features = weight.shape if is_transposed else reversed(weight.shape)
        self.together, self.streams = together, streams
        together.members.append(self)

    def forward(self, tensor: Tensor) -> Tensor:
        result = self.together.run(tensor, self)
        if self.streams is not None and self.training:
            self.streams.part(tensor.device)
        return result

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.together.group}"


class RowLinear(nn.Module):
    """This rank's inputs of a linear layer, summed over the ranks. The bias is added once, after the sum.

    `scatters`: each rank keeps its piece of the sum along the sequence.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, *, is_transposed: bool,
        streams: Streams | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight, self.bias, self.is_transposed = weight, bias, is_transposed
        self.in_features, self.out_features = weight.shape if is_transposed else reversed(weight.shape)
        self.group, self.streams = group, streams
        self.scatters = False

    def forward(self, tensor: Tensor) -> Tensor:
        part = functional.linear(tensor, self.weight.t() if self.is_transposed else self.weight)
        if self.streams is not None:
            self.streams.meet(tensor.device)
        if self.scatters:
            whole = sum_scatter(part, self.group, sequence_dim(part))
        else:
            whole = sum_over(part, self.group, in_place=True)
        return whole if self.bias is None else whole + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.group}"


def sequence_dim(tensor: Tensor) -> int:
    """The dim of the sequence in (batch, sequence, channels); where both are one dim, that."""
    return max(tensor.dim() - 2, 0)


class _Columns(torch.autograd.Function):
    """Several linear layers on one input: x, w1, b1, w2, b2, ... to y1, y2, ..."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, transposed: tuple[bool, ...], *weights: Tensor | None) -> Any:
        kind = _computing_type(tensor)
        given, ctx.kinds = tensor.to(kind), (tensor.dtype, [None if each is None else each.dtype for each in weights])
        matrices = [each.to(kind) for each in weights[::2] if each is not None]
        ctx.save_for_backward(given, *matrices)
        ctx.group, ctx.transposed = group, transposed
        ctx.are_tensors = (True, False, False, *(each is not None for each in weights))
        with torch.autocast(tensor.device.type if not tensor.is_meta else "cpu", enabled=False):
            return tuple(
                functional.linear(given, matrix.t() if turned else matrix, None if bias is None else bias.to(kind))
                for matrix, bias, turned in zip(matrices, weights[1::2], transposed, strict=True)
            )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given, *matrices = ctx.saved_tensors
        arrived = [None if each is None else each.reshape(-1, each.shape[-1]) for each in gradients]
        pending = None
        if wants(ctx, 0):
            pending = start_all_reduce(_input_gradient(arrived, matrices, ctx.transposed, given), ctx.group)
        rows = given.reshape(-1, given.shape[-1])
        found: list[Tensor | None] = []
        for number, (gradient, turned) in enumerate(zip(arrived, ctx.transposed, strict=True)):
            for which in range(2):
                kind = ctx.kinds[1][2 * number + which]
                if gradient is None or kind is None or not wants(ctx, 3 + 2 * number + which):
                    found.append(None)
                elif which:
                    found.append(gradient.sum(0).to(kind))
                else:
                    found.append((rows.t() @ gradient if turned else gradient.t() @ rows).to(kind))
        summed = None if pending is None else pending.finish().view(given.shape).to(ctx.kinds[0])
        return summed, None, None, *found


def _input_gradient(
    gradients: list[Tensor | None], matrices: list[Tensor], transposed: tuple[bool, ...], given: Tensor
) -> Tensor:
    total: Tensor | None = None
    for gradient, matrix, turned in zip(gradients, matrices, transposed, strict=True):
        if gradient is not None:
            straight = matrix.t() if turned else matrix
            total = gradient @ straight if total is None else total.addmm_(gradient, straight)
    return given.new_zeros(given.shape).reshape(-1, given.shape[-1]) if total is None else total


def wants(ctx: Any, number: int) -> bool:
    """Whether this run of backward goes on to an input of a node: halves of a backward ask for some only."""
    if not ctx.needs_input_grad[number]:
        return False
    # The engine knows inputs that are tensors, and no others.
    node = ctx.next_functions[sum(ctx.are_tensors[:number])][0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True  # A leaf whose gradient is asked for by name.


def _computing_type(tensor: Tensor) -> torch.dtype:
    """What matmuls compute in: under autocast its type."""
    device = "cpu" if tensor.is_meta else tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype
