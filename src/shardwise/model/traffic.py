"""Bytes that an operation reads and writes on one rank, in each of the three passes.

Each kernel reads each operand once and writes each result once: the minimum even with a sufficient cache. A tensor that
the next kernel reads again is counted again there. Weight gradients are counted in the activations' width;
accumulation in float32 is priced with the optimizer.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shardwise.model.flops import Passes, add_passes, gemm, num_pairs
from shardwise.model.operations import (
    Attention,
    Convolution,
    CrossEntropy,
    Elementwise,
    Embedding,
    Matmul,
    Moves,
    Norm,
    Operation,
    Permutation,
    Product,
    Router,
    Scan,
)
from shardwise.model.share import Count, Share, divided

FLOAT32 = 4

# Without a fused kernel, an RMS norm is six kernels forward (to float32, square, mean, scale, back, times the weight)
# and twice as many backward. Each pair: accesses to an element in the activations' width, and in float32. The pairs:
# read, written, read backward, written backward. Counted on Hugging Face's definition, call by call.
_UNFUSED_RMS = ((2, 4), (2, 3), (5, 12), (3, 8))


class Traffic(NamedTuple):
    """Bytes read and bytes written."""

    read: Passes
    written: Passes

    @property
    def moved(self) -> Passes:
        """Bytes read plus bytes written, pass by pass."""
        return add_passes((self.read, self.written))


def traffic(operation: Operation, share: Share) -> Traffic:
    """Return the bytes of one operation on one rank."""
    return _COUNTERS[type(operation)](operation, share)


def sum_traffic(operations: Iterable[Operation], share: Share) -> Traffic:
    """Return the sum of the bytes of several operations."""
    each = [traffic(operation, share) for operation in operations]
    return Traffic(add_passes(one.read for one in each), add_passes(one.written for one in each))


def _streamed(read: Count, written: Count) -> Traffic:
    """Return the bytes of the backward: it reads the input and the output's gradient, and writes the input's."""
    return Traffic(Passes(read, read + written, 0), Passes(written, read, 0))


def _moved(times: Count, moves: Moves) -> Traffic:
    """Return the traffic of `times` rows or elements, each with these moves."""
    return Traffic(
        Passes(times * moves.read, times * moves.read_back, 0),
        Passes(times * moves.written, times * moves.written_back, 0),
    )


def _matmul(operation: Matmul, share: Share) -> Traffic:
    shape = gemm(operation, share)
    inputs = shape.num_products * shape.m * shape.k * share.width
    outputs = shape.num_products * shape.m * shape.n * share.width
    weights = shape.num_products * shape.k * shape.n * share.width
    return _weighted(operation, inputs, outputs, weights)


def _convolution(operation: Convolution, share: Share) -> Traffic:
    inputs = share.microbatch * operation.in_positions * operation.in_channels * share.width
    positions = operation.out_positions or operation.positions
    outputs = share.microbatch * positions * operation.out_channels * share.width
    weights = operation.in_channels // operation.groups * operation.kernel * operation.out_channels * share.width
    return _weighted(operation, inputs, outputs, weights)


def _weighted(operation: Matmul | Convolution, inputs: Count, outputs: Count, weights: Count) -> Traffic:
    passed, trained = operation.input_gradient, operation.trains
    return Traffic(
        read=Passes(inputs + weights, (outputs + weights) * passed, (inputs + outputs) * trained),
        written=Passes(outputs, inputs * passed, weights * trained),
    )


def _product(operation: Product, share: Share) -> Traffic:
    products = share.microbatch * operation.batch * share.width
    operands = products * (operation.m * operation.k + operation.k * operation.n)
    outputs = products * operation.m * operation.n
    return Traffic(Passes(operands, operands + 2 * outputs, 0), Passes(outputs, operands, 0))


def _attention(operation: Attention, share: Share) -> Traffic:
    """Reads queries, keys and values, and writes outputs. Without flash, the matrix of scores also moves repeatedly."""
    heads, kv_heads = divided(operation.heads, share.tp), divided(operation.kv_heads, share.tp)
    rows = share.num_rows(operation.rows)
    keys = rows if operation.key_rows is None else share.num_rows(operation.key_rows)
    queries = rows * heads * operation.qk_dim * share.width
    cached = keys * kv_heads * (operation.qk_dim + operation.v_dim) * share.width
    outputs: Count = rows * heads * operation.v_dim * share.width
    inputs: Count = queries + cached
    if share.flash:
        sums = rows * heads * FLOAT32
        return Traffic(
            Passes(inputs, inputs + 2 * outputs + sums, 0),
            Passes(outputs + sums, inputs, 0),
        )
    pairs: Count = divided(share.microbatch * num_pairs(operation, share) * heads, 2 * share.cp)
    scores = _scores(operation, share)
    return Traffic(
        Passes(inputs + pairs * scores.read, inputs + outputs + pairs * scores.read_back, 0),
        Passes(outputs + pairs * scores.written, inputs + pairs * scores.written_back, 0),
    )


def _scores(operation: Attention, share: Share) -> Moves:
    """Return the bytes moved for one score. Forward: product, softmax, dropout, product. Backward: the reverse."""
    width, dropout = share.width, operation.dropout
    fused = Moves(
        read=(2 + dropout) * width,
        written=(2 + dropout) * width + dropout,
        read_back=5 * width + dropout,
        written_back=2 * width,
    )
    if share.fused:
        return fused
    # Scale and mask are separate kernels. The softmax returns float32, which another kernel narrows.
    return Moves(
        read=fused.read + 2 * width + FLOAT32,
        written=fused.written + 2 * width + FLOAT32,
        read_back=fused.read_back + 2 * FLOAT32,
        written_back=fused.written_back + width + FLOAT32,
    )


def _norm(operation: Norm, share: Share) -> Traffic:
    elements = share.part(share.num_rows(operation.rows), operation.cut) * operation.elements
    if operation.kind != "rms" or share.fused:
        return _streamed(elements * share.width, elements * share.width)
    return _moved(elements, Moves(*(own * share.width + wide * FLOAT32 for own, wide in _UNFUSED_RMS)))


def _elementwise(operation: Elementwise, share: Share) -> Traffic:
    rows = share.part(share.num_rows(operation.rows) * operation.copies, operation.cut) * share.width
    return _moved(rows, operation.fused if share.fused else operation.unfused)


def _embedding(operation: Embedding, share: Share) -> Traffic:
    """Return the bytes of a table's gradient, which is as large as the table, even if few rows were looked up."""
    rows = share.num_rows(operation.rows) * operation.elements * share.width
    table = divided(operation.vocabulary, share.tp if operation.sharding == "row" else 1)
    return Traffic(
        Passes(rows, 0, rows * operation.trains),
        Passes(rows, 0, table * operation.elements * share.width * operation.trains),
    )


def _cross_entropy(operation: CrossEntropy, share: Share) -> Traffic:
    """Fused: reads the logits once forward, and once for their gradient. Else: a softmax of a float32 copy."""
    logits = share.part(share.num_rows(operation.rows), operation.cut) * operation.vocabulary
    plain, copy = logits * share.width, logits * FLOAT32
    if share.fused:
        return Traffic(Passes(plain, plain, 0), Passes(0, plain, 0))
    return Traffic(Passes(plain + copy, 2 * copy, 0), Passes(2 * copy, copy + plain, 0))


def _router(operation: Router, share: Share) -> Traffic:
    scores = divided(share.num_rows(operation.rows), share.outside) * operation.num_experts * FLOAT32
    return _streamed(scores, scores)


def _permutation(operation: Permutation, share: Share) -> Traffic:
    one = share.part(share.num_rows(operation.rows), "experts") * operation.elements * share.width
    copies = one * operation.top_k
    read, written = (one, copies) if operation.direction == "dispatch" else (copies, one)
    return Traffic(Passes(read, written, 0), Passes(written, read, 0))


def _scan(operation: Scan, share: Share) -> Traffic:
    rows = share.num_rows(operation.rows) * share.width
    values: Count = rows * divided(operation.heads, share.tp) * operation.head_dim
    states: Count = rows * divided(operation.groups, share.tp) * 2 * operation.state
    # The short convolution is a kernel before the scan: its input and its output pass through memory.
    return _streamed(2 * (values + states), 2 * values + states)


_COUNTERS: dict[type[Operation], Callable[[Any, Share], Traffic]] = {
    Matmul: _matmul,
    Attention: _attention,
    Product: _product,
    Convolution: _convolution,
    Norm: _norm,
    Elementwise: _elementwise,
    Embedding: _embedding,
    CrossEntropy: _cross_entropy,
    Router: _router,
    Permutation: _permutation,
    Scan: _scan,
}
