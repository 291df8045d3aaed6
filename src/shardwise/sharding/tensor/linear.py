"""Linear layers cut by their outputs (columns) or by their inputs (rows), and the matmuls of both.

    x ── column ── operations within channels ── row ── sum over the ranks

Columns that read one tensor (query, key and value; gate and up) are computed together. So their input is gathered once,
and backward sums their input gradients on this rank first, then once over the ranks, while the weight gradients are
computed. For row layers each rank multiplies its own inputs, and the results are summed.
"""

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import Group
from shardwise.sharding.rng_tracker import RngTracker
from shardwise.sharding.tensor.communication import AllReduce, Chunk, Multiply, NoCommunication, SequenceShards
from shardwise.sharding.tensor.lazy_gather import LazyGather, SequenceLength
from shardwise.sharding.tensor.products import Products
from shardwise.stages.recalled import keep, taken
from shardwise.torch_private import is_input_wanted, version_of


class ParallelLinear(nn.Linear):
    """This rank's part of a linear layer. `is_transposed`: its weight is stored as (inputs, outputs).

    It is an `nn.Linear`, since scripts look for layers by class (`isinstance(each, nn.Linear)`)."""

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, *, is_transposed: bool,
        rng: RngTracker | None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)  # Not nn.Linear's, which would allocate weights.
        self.weight, self.is_transposed = weight, is_transposed
        self.register_parameter("bias", bias)
        self.in_features, self.out_features = weight.shape if is_transposed else reversed(weight.shape)
        self.group, self.rng = group, rng

    def reset_parameters(self) -> None:
        """Refuse. `nn.Linear` has this method, but a part cannot be drawn as if it were part of the whole."""
        raise ShardwiseError(
            f"a layer has {self.in_features} x {self.out_features} of its numbers on this rank (tp={self.group.size}),"
            " and cannot be drawn anew by itself",
            remedy="draw the whole layer's weights, and engine.load_state_dict(state) with them, on every rank",
        )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.group}"


class ColumnSet:
    """Column layers that read the same tensor.

    The first one called computes all of them; the others take their results. Gathers and sums are split into
    `num_chunks`, or by their size if it is None.
    """

    def __init__(self, group: Group, num_chunks: int | None = None) -> None:
        self.group, self.num_chunks = group, num_chunks
        #: Set if the input is this rank's piece of a sequence, to be gathered here.
        self.gathers: SequenceLength | None = None
        #: Whether the gradient of the input is summed here. If not, the producer of the input does it.
        self.reduces = True
        self.members: list[ColumnParallelLinear] = []
        #: The way that they multiply.
        self.products = Products()
        self._ready: dict[int, Tensor] = {}
        self._of: weakref.ref[Tensor] | None = None
        self._state = 0, False

    def __deepcopy__(self, memo: dict[int, Any]) -> "ColumnSet":
        twin = ColumnSet(self.group, self.num_chunks)
        twin.gathers, twin.reduces, twin.products = self.gathers, self.reduces, self.products
        memo[id(self)] = twin
        twin.members = [copy.deepcopy(each, memo) for each in self.members]
        return twin

    def run(self, tensor: Tensor, asked: "ColumnParallelLinear") -> Tensor:
        # An input that was written to since, or another grad mode, counts as another input.
        given = tensor.piece if isinstance(tensor, LazyGather) else tensor
        state = 0 if given.is_inference() else version_of(given), torch.is_grad_enabled()
        is_same = self._of is not None and self._of() is tensor and self._state == state
        if not is_same or id(asked) not in self._ready:
            # Compute all of them, even if one is called again: a recomputed forward must save as many tensors as the
            # first one did, and must not take results left from an earlier forward.
            self._ready = dict(zip(map(id, self.members), self._compute(tensor, self.members), strict=True))
            self._of, self._state = weakref.ref(tensor), state
        return self._ready.pop(id(asked))

    def _compute(self, tensor: Tensor, layers: "list[ColumnParallelLinear]") -> tuple[Tensor, ...]:
        weights: list[Tensor | None] = []
        for each in layers:
            weights += [each.weight, each.bias]
        transposed = tuple(each.is_transposed for each in layers)
        given, length = (tensor.piece, tensor.length) if isinstance(tensor, LazyGather) else (tensor, self.gathers)
        communication: NoCommunication = NoCommunication(shape := given.shape[:-1])
        if length is not None:
            communication = SequenceShards(length.whole_shape(shape), length.tokens, self.group, self.num_chunks)
        elif self.reduces:
            communication = AllReduce(shape, self.group, self.num_chunks)
        return _Columns.apply(given, communication, self.products, transposed, *weights)  # type: ignore[no-untyped-call, no-any-return]


class ColumnParallelLinear(ParallelLinear):
    """This rank's outputs of a linear layer."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, together: ColumnSet, *, is_transposed: bool,
        rng: RngTracker | None,
    ) -> None:  # fmt: skip
        super().__init__(weight, bias, together.group, is_transposed=is_transposed, rng=rng)
        self.together = together
        together.members.append(self)

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it, which a caller may use.
        result = self.together.run(input, self)
        if self.rng is not None and self.training:
            self.rng.enter(input.device)
        return result


class _Columns(torch.autograd.Function):
    """Several linear layers on one input: x, w1, b1, w2, b2, ... to y1, y2, ..."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, communication: NoCommunication, products: Products, transposed: tuple[bool, ...],
        *weights: Tensor | None,
    ) -> Any:  # fmt: skip
        kind = _computing_type(tensor)
        given, ctx.kinds = tensor.to(kind), (tensor.dtype, [None if each is None else each.dtype for each in weights])
        matrices = [products.kept_weight(each, kind) for each in weights[::2] if each is not None]
        biases = [None if each is None else each.to(kind) for each in weights[1::2]]
        known = taken(_Columns)
        straight: list[Any] = []
        made: list[Tensor] = [] if known is None else known
        for matrix, turned in zip(matrices, transposed, strict=True) if known is None else ():
            straight.append(products.forward_matrix(matrix, turned))
            made.append(communication.room(_outputs(matrix, turned), given))
        ctx.chunks, kept = [], []
        for chunk, rows in communication.receive(given):
            ctx.chunks.append(chunk)
            left, later = products.read(rows, any(ctx.needs_input_grad[4::2]))
            kept.append(later)
            for each, bias, into in zip(straight, biases, made, strict=True) if known is None else ():
                products.multiply(left, each, bias, chunk.of(into))
        keep(_Columns, made)
        ctx.save_for_backward(*(each for some in kept for each in some), *matrices)
        ctx.communication, ctx.transposed, ctx.products, ctx.computing = communication, transposed, products, kind
        ctx.are_tensors = (True, False, False, False, *(each is not None for each in weights))
        # Models write to the outputs in place, which autograd forbids for views.
        return tuple(communication.whole(each).detach() for each in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        products: Products = ctx.products
        saved = ctx.saved_tensors  # Read once: a checkpoint returns them only once.
        count = len(saved) - len(ctx.transposed)
        arrived, matrices = _in_runs(saved[:count], len(ctx.chunks)), saved[count:]
        laid = [None if each is None else ctx.communication.lay(each) for each in gradients]
        finish = None
        # The input gradient goes first: its sum over the ranks overlaps with the weight gradients.
        if is_input_wanted(ctx, 0):
            back = [products.backward_matrix(*each) for each in zip(matrices, ctx.transposed, strict=True)]
            width = _inputs(matrices[0], ctx.transposed[0])
            like = matrices[0].new_empty((), dtype=ctx.computing)
            finish = ctx.communication.send(width, like, _input_gradient(products, laid, back))
        found: list[Tensor | None] = []
        for number, (gradient, turned) in enumerate(zip(laid, ctx.transposed, strict=True)):
            for which in range(2):
                kind = ctx.kinds[1][2 * number + which]
                if gradient is None or kind is None or not is_input_wanted(ctx, 4 + 2 * number + which):
                    found.append(None)
                elif which:
                    found.append(gradient.sum((0, 1, 2)).to(kind))
                else:
                    pairs = ((rows, chunk.rows(gradient)) for chunk, rows in zip(ctx.chunks, arrived, strict=True))
                    found.append(products.weight_gradient(pairs, kind, is_transposed=turned))
        return None if finish is None else finish().to(ctx.kinds[0]), None, None, None, *found


def _input_gradient(products: Products, gradients: list[Tensor | None], matrices: list[Any]) -> Multiply:
    """Return a function that computes the gradient of the layers' input: the sum of the gradients through each."""

    there = [(each, matrix) for each, matrix in zip(gradients, matrices, strict=True) if each is not None]

    def multiply_all(chunk: Chunk, into: Tensor) -> None:
        if not there:
            into.zero_()
        for number, (gradient, matrix) in enumerate(there):
            left = products.read_gradient(chunk.rows(gradient))
            if number == 0:
                products.multiply(left, matrix, None, into)
            else:
                products.add(left, matrix, into)

    return multiply_all


class RowParallelLinear(ParallelLinear):
    """A linear layer over this rank's inputs, summed over the ranks. The bias is added once, after the sum.

    The sum is split into `num_chunks`, or by its size if it is None.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, *, is_transposed: bool,
        rng: RngTracker | None, num_chunks: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(weight, bias, group, is_transposed=is_transposed, rng=rng)
        self.num_chunks, self.products = num_chunks, Products()
        #: Set if each rank keeps only its piece of the sequence.
        self.scatters: SequenceLength | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.rng is not None:
            self.rng.leave(input.device)
        shape, how = input.shape[:-1], (self.group, self.num_chunks)
        communication = (
            AllReduce(shape, *how) if self.scatters is None else SequenceShards(shape, self.scatters.tokens, *how)
        )
        # A bias inside the sum would be added once by each rank.
        whole: Tensor = _Rows.apply(input, self.weight, communication, self.products, self.is_transposed)  # type: ignore[no-untyped-call]
        return whole if self.bias is None else whole + self.bias


class _Rows(torch.autograd.Function):
    """The sum of x @ w over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, weight: Tensor, communication: NoCommunication, products: Products,
        is_transposed: bool,
    ) -> Tensor:  # fmt: skip
        kind = _computing_type(tensor)
        given, matrix = tensor.to(kind), products.kept_weight(weight, kind)
        kept = products.take(given, communication.lay)
        ctx.save_for_backward(*kept, matrix)
        ctx.communication, ctx.products, ctx.is_transposed = communication, products, is_transposed
        ctx.are_tensors, ctx.left, ctx.kinds = (True, True), None, (tensor.dtype, weight.dtype)
        known: Tensor | None = taken(_Rows)
        if known is not None:
            return known
        straight, rows_of = products.forward_matrix(matrix, is_transposed), products.rows_of(kept, communication.lay)
        finish = communication.send(
            _outputs(matrix, is_transposed),
            given,
            lambda chunk, rows: products.multiply(rows_of(chunk), straight, None, rows),
        )
        made = finish().detach()  # Models write to it in place, which autograd forbids for a view.
        keep(_Rows, made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *kept, matrix = ctx.saved_tensors
        products: Products = ctx.products
        wants_input, wants_weight = is_input_wanted(ctx, 0), is_input_wanted(ctx, 1)
        if wants_input or ctx.left is None or ctx.left[0] is not gradient:
            found, arrived = _receive(ctx, gradient, matrix if wants_input else None)
        else:  # The second half of a split backward: the first half left the rows that it received.
            found, (_, arrived) = None, ctx.left
        later = ctx.needs_input_grad[1] and not wants_weight
        ctx.left = (gradient, arrived) if later else None
        turned: Tensor | None = None
        if wants_weight:
            columns_of = products.columns_of(kept, ctx.communication.lay)
            pairs = ((columns_of(chunk), rows) for chunk, rows in arrived)
            turned = products.weight_gradient(pairs, ctx.kinds[1], is_transposed=ctx.is_transposed)
        return None if found is None else found.to(ctx.kinds[0]), turned, None, None, None


def _receive(ctx: Any, gradient: Tensor, matrix: Tensor | None) -> tuple[Tensor | None, list[tuple[Chunk, Tensor]]]:
    """Return the gradient of a layer's input, if `matrix` is given, and the chunks of output gradients received."""
    communication: NoCommunication = ctx.communication
    products: Products = ctx.products
    laid, back = None, None
    if matrix is not None:
        laid = communication.room(_inputs(matrix, ctx.is_transposed), gradient)
        back = products.backward_matrix(matrix, ctx.is_transposed)
    arrived = []
    for chunk, rows in communication.receive(gradient):
        arrived.append((chunk, rows))
        if laid is not None:
            products.multiply(products.read_gradient(rows), back, None, chunk.of(laid))
    return None if laid is None else communication.whole(laid), arrived


def _in_runs(tensors: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    size = len(tensors) // count
    return [tensors[size * number : size * (number + 1)] for number in range(count)]


def _inputs(weight: Tensor, is_transposed: bool) -> int:
    return weight.shape[0 if is_transposed else 1]


def _outputs(weight: Tensor, is_transposed: bool) -> int:
    return weight.shape[1 if is_transposed else 0]


def _computing_type(tensor: Tensor) -> torch.dtype:
    """Return the dtype of matmuls: that of autocast if it is on, or else that of the input."""
    device = "cpu" if tensor.is_meta else tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype
