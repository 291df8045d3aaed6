"""Arithmetic of an operation on one rank: forward, gradient of the input, gradient of the weight.

A multiplication and an addition are two FLOPs. Only matrix products are counted. Everything else is memory-bound; its
bytes are counted in `traffic.py`.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from shardwise.model.operations import Attention, Convolution, Matmul, Operation, Product, Scan, Width
from shardwise.model.share import Count, Share, divided, total


class Passes(NamedTuple):
    """One quantity of each of the three passes: forward `F`, input gradient `I`, weight gradient `W`."""

    forward: Count
    input: Count
    weight: Count

    @property
    def backward(self) -> Count:
        return self.input + self.weight

    @property
    def total(self) -> Count:
        return self.forward + self.input + self.weight

    def times(self, count: int) -> "Passes":
        return Passes(self.forward * count, self.input * count, self.weight * count)


NOTHING = Passes(0, 0, 0)


class Gemm(NamedTuple):
    """`num_products` products of m x k by k x n, computed by one rank in the forward.

    The gradient of the input is m x n by n x k; the gradient of the weight is k x m by m x n.
    """

    m: Count
    k: Count
    n: Count
    num_products: Count


def flops(operation: Operation, share: Share) -> Passes:
    """Return the FLOPs of one operation on one rank. Attention counts what its kernel computes: see `num_pairs`."""
    match operation:
        case Matmul():
            weights = _inputs_on(operation, share) * _outputs_on(operation, share)
            return _trained(operation, 2 * expert_rows(operation, share) * weights)
        case Convolution():
            filters = operation.in_channels // operation.groups * operation.kernel * operation.out_channels
            return _trained(operation, 2 * share.microbatch * operation.positions * filters)
        case Attention():
            return _attention(operation, share)
        case Product():
            forward = 2 * share.microbatch * operation.batch * operation.m * operation.k * operation.n
            return Passes(forward, 2 * forward, 0)
        case Scan():
            forward = _scan(operation, share)
            return Passes(forward, 2 * forward, 0)
        case _:
            return NOTHING


def sum_flops(operations: Iterable[Operation], share: Share) -> Passes:
    """Return the sum of the FLOPs of several operations."""
    return add_passes(flops(operation, share) for operation in operations)


def rerun_flops(operations: Iterable[Operation], share: Share, recompute: str | Collection[str]) -> Count:
    """Return the FLOPs that the backward recomputes: all operations (`full`), or those of the chosen parts."""
    parts = chosen_parts(recompute)
    again = [each for each in operations if parts is None or not parts.isdisjoint(each.rerun_by)]
    return sum_flops(again, share).forward


def chosen_parts(recompute: str | Collection[str]) -> frozenset[str] | None:
    """Return the parts that a choice of recomputation names; None means all (`full`)."""
    if recompute == "full":
        return None
    if recompute == "none":
        return frozenset()
    return frozenset({"core_attention"} if isinstance(recompute, str) else recompute)


def gemm(operation: Matmul, share: Share) -> Gemm:
    """Return the shape of a matmul on one rank. For experts, rows are assumed to be spread evenly over them."""
    experts = divided(operation.num_experts, share.ep) if operation.num_experts else 1
    return Gemm(
        m=divided(expert_rows(operation, share), experts),
        k=_inputs_on(operation, share),
        n=_outputs_on(operation, share),
        num_products=experts,
    )


def expert_rows(operation: Matmul, share: Share) -> Count:
    """Return the rows that a rank multiplies, summed over its experts.

    A weight that tensor parallelism does not cut multiplies only the rows of its rank: `1/tp` of all rows under
    sequence parallelism. An expert that is cut less than the rest of the layer (`expert_tp < tp`) gets `expert_tp/tp`.
    """
    rows = share.num_rows(operation.rows)
    if operation.num_experts:
        return rows * operation.top_k * share.expert_tp // share.tp
    return divided(rows, share.outside) if operation.sharding == "none" else rows


def num_pairs(operation: Attention, share: Share) -> Count:
    """Return twice the number of multiplied query-key pairs of one sample, before cp divides them.

    Twice the number is always an integer: a causal sequence has s(s+1)/2 pairs. Flash attention skips masked pairs;
    attention with a matrix of scores multiplies all pairs and then masks.
    """
    queries: Count = share.sequence if operation.rows is None else operation.rows
    keys: Count = queries if operation.key_rows is None else operation.key_rows
    if not (share.flash and operation.causal):
        return 2 * queries * keys
    if operation.chunk is not None:
        chunks: Count = queries // operation.chunk
        rest: Count = queries % operation.chunk
        return chunks * operation.chunk * (operation.chunk + 1) + rest * (rest + 1)
    if operation.window is not None:
        beyond: Count = (queries - operation.window) * (queries > operation.window)
        full: Count = queries - beyond
        return full * (full + 1) + 2 * beyond * operation.window
    return queries * (queries + 1)


def add_passes(passes: Iterable[Passes]) -> Passes:
    """Return the sum, pass by pass."""
    each = list(passes)
    return Passes(
        total(one.forward for one in each), total(one.input for one in each), total(one.weight for one in each)
    )


def width_on(width: Width, ranks: Count) -> Count:
    """Return the elements of a row that one of `ranks` ranks has: the largest part, if units do not divide evenly."""
    return divided(width.units, ranks) * width.size


def _trained(operation: Matmul | Convolution, forward: Count) -> Passes:
    return Passes(forward, forward * operation.input_gradient, forward * operation.trains)


def _inputs_on(operation: Matmul, share: Share) -> Count:
    return width_on(operation.inputs, _ranks(operation, share)) if operation.sharding == "row" else operation.k


def _outputs_on(operation: Matmul, share: Share) -> Count:
    if operation.sharding != "column":
        return operation.n
    return total(width_on(width, _ranks(operation, share)) for width in operation.outputs)


def _ranks(operation: Matmul, share: Share) -> Count:
    return share.expert_tp if operation.num_experts else share.tp


def _attention(operation: Attention, share: Share) -> Passes:
    """Return the FLOPs of the backward: four products for the forward's two. Flash attention recomputes the scores
    too."""
    pairs = divided(share.microbatch * num_pairs(operation, share) * divided(operation.heads, share.tp), share.cp)
    forward = pairs * (operation.qk_dim + operation.v_dim)
    again = pairs * operation.qk_dim * share.flash
    return Passes(forward, 2 * forward + again, 0)


def _scan(operation: Scan, share: Share) -> Count:
    """Mamba 2 as products of matrices (Dao and Gu 2024, section 6): within chunks, and through the states between."""
    heads = divided(operation.heads, share.tp)
    groups = divided(operation.groups, share.tp)
    # The annotations keep the type checker from multiplying out every union of types: a tenth of its time.
    inside: Count = operation.chunk * (operation.state * groups + operation.head_dim * heads)
    through: Count = 2 * operation.state * operation.head_dim * heads
    convolved: Count = operation.convolution * (heads * operation.head_dim + 2 * groups * operation.state)
    of_a_row: Count = inside + through + convolved
    return 2 * share.num_rows(operation.rows) * of_a_row
