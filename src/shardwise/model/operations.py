"""The operations that a block is made of: shapes and how they are cut, and nothing about time.

A row is what an operation is repeated over: a position of a sequence, an image, a patch. `rows` counts them for one
sample; None says "as many as the sequence has positions". Widths are elements of one row.

What an operation costs follows from its shape: `flops.py` (arithmetic), `traffic.py` (bytes read and written),
`activations.py` (bytes kept for the backward).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from shardwise.model.share import Cut

# How a weight is cut. `column`: by its outputs. `row`: by its inputs, after which ranks add up what they have.
# `none`: every rank has all of it.
Sharding: TypeAlias = Literal["column", "row", "none"]


class Width(NamedTuple):
    """Elements of a row, in `units` of `size` that are not cut: 32 heads of 128, 14336 channels of 1."""

    units: int
    size: int = 1

    @property
    def elements(self) -> int:
        return self.units * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor that is kept from the forward for the backward.

    `elements` of each row; with `per_key`, of each pair of a row and a position of the sequence. Tensor parallelism
    cuts them in `units` at most (None: anywhere). `width` is bytes of an element (None: those of an activation;
    dropout masks have 1, statistics 4). `copies` is how often a row is there (an expert's rows: `top_k` times).

    `when` says which software keeps it: `always`, `flash` (only flash attention), `scores` (only attention without
    flash), `unfused` (only where elementwise chains are not fused), `fused`, or `unfused scores` (neither of both).

    `dropped_by` are the choices of selective recomputation that make it again instead: `core_attention` (scores),
    `norm` (outputs of norms), `activation` (output of the nonlinearity), `mlp`, `moe`, `mla_up`.
    """

    name: str
    elements: int
    cut: Cut = "sequence"
    units: int | None = None
    width: int | None = None
    rows: int | None = None
    copies: int = 1
    per_key: bool = False
    when: Literal["always", "flash", "scores", "unfused", "fused", "unfused scores"] = "always"
    dropped_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What all have: a name, what is kept for the backward, and the choices of recomputation that run it again."""

    name: str
    saves: tuple[Saved, ...] = ()
    rerun_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul(Operation):
    """Rows times a weight of k x n.

    `outputs` are the parts of n that an implementation without fused projections computes one by one: query, key and
    value; gate and up. With `num_experts` the weight is that of each expert, and each row goes to `top_k` of them.
    `input_gradient` is False where nothing before it trains (the first layer on pixels).
    """

    inputs: Width
    outputs: tuple[Width, ...]
    sharding: Sharding = "none"
    bias: bool = False
    num_experts: int = 0
    top_k: int = 1
    rows: int | None = None
    trains: bool = True
    input_gradient: bool = True

    @property
    def k(self) -> int:
        return self.inputs.elements

    @property
    def n(self) -> int:
        return sum(width.elements for width in self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Operation):
    """Queries times keys, softmax, times values. Heads are cut by tp.

    `qk_dim` and `v_dim` are of one head; multi-head latent attention has them unequal. A query sees the keys up to its
    own if `causal`, at most `window` of them, and none before its own chunk of `chunk` positions. `key_rows` is the
    number of keys if it is not that of the rows (cross attention); None: the same.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    dropout: bool = False
    rows: int | None = None
    key_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Operation):
    """Matrices of activations multiplied: for each sample, `batch` products of m x k by k x n. From traced modules."""

    batch: int
    m: int
    k: int
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Operation):
    """Root mean square or layer normalisation over `elements` of each row."""

    kind: Literal["rms", "layer", "batch", "group"]
    elements: int
    cut: Cut = "sequence"
    rows: int | None = None


class Moves(NamedTuple):
    """Elements of one row that pass through memory: read and written forward, read and written backward."""

    read: int
    written: int
    read_back: int
    written_back: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise(Operation):
    """Anything bound by memory: nonlinearities, rotations, residual additions, dropout.

    `fused` is what one kernel moves, `unfused` the sum over the kernels that plain torch launches. `copies` is how
    often a row is there (an expert's rows).
    """

    fused: Moves
    unfused: Moves
    cut: Cut = "sequence"
    rows: int | None = None
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(Operation):
    """A row of a table looked up for each position. The table is cut by its rows if `sharding` is `row`."""

    vocabulary: int
    elements: int
    sharding: Sharding = "row"
    rows: int | None = None
    trains: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(Operation):
    """Softmax over the vocabulary and the loss of each row. The logits are cut by tp if `cut` is `tp`."""

    vocabulary: int
    cut: Cut = "tp"
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution(Operation):
    """A filter of `kernel` taps from one set of channels to another, applied at `positions` of each sample.

    These are its outputs; a transposed filter is applied at its inputs, and has its outputs in `out_positions`.
    """

    in_channels: int
    out_channels: int
    kernel: int
    positions: int
    in_positions: int
    out_positions: int | None = None
    groups: int = 1
    bias: bool = False
    trains: bool = True
    input_gradient: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Router(Operation):
    """Scores of `num_experts` for each row turned into the `top_k` chosen. Their matmul is a `Matmul` before it."""

    num_experts: int
    top_k: int
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation(Operation):
    """Rows to their experts (`dispatch`) or back and added up (`combine`): over ep an all-to-all of `top_k` copies."""

    direction: Literal["dispatch", "combine"]
    elements: int
    top_k: int
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan(Operation):
    """The recurrence of Mamba 2 with its short convolution, in chunks of `chunk` positions. Heads are cut by tp."""

    heads: int
    head_dim: int
    groups: int
    state: int
    convolution: int
    chunk: int
    rows: int | None = None
