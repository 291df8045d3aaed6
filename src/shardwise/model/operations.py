"""The operations of a block: their shapes and how they are cut, but no times.

An operation is repeated over rows: positions of a sequence, images, patches. `rows` is their number for one sample;
None means the number of positions of the sequence. Widths are elements of one row.

The costs of an operation follow from its shape: `flops.py` (arithmetic), `traffic.py` (bytes read and written),
`activations.py` (bytes saved for the backward).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from shardwise.model.share import Cut

# How a weight is cut. `column`: by outputs. `row`: by inputs, so that the ranks' results are partial sums to be
# reduced. `none`: every rank has the whole weight.
Sharding: TypeAlias = Literal["column", "row", "none"]


class Width(NamedTuple):
    """Elements of a row, in `units` indivisible parts of `size` elements: 32 heads of 128, 14336 channels of 1."""

    units: int
    size: int = 1

    @property
    def elements(self) -> int:
        return self.units * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor that the forward saves for the backward.

    Each row has `elements`; with `per_key`, each pair of a row and a position of the sequence. Tensor parallelism
    cuts them in at most `units` parts (None: anywhere). `width` is the bytes of an element (None: as an activation;
    dropout masks have 1, statistics 4). `copies` is how often each row occurs (an expert's rows: `top_k` times).

    `when` is the software that saves it: `always`, `flash` (only flash attention), `scores` (only attention without
    flash), `unfused` (only if elementwise chains are not fused), `fused`, or `unfused scores` (neither of the two).

    `dropped_by` are the choices of selective recomputation that recompute it instead: `core_attention` (scores),
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
    """Fields of every operation: its name, the tensors it saves, and the choices of recomputation that rerun it."""

    name: str
    saves: tuple[Saved, ...] = ()
    rerun_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul(Operation):
    """Rows times a weight of k x n.

    `outputs` are the parts of n that an implementation without fused projections computes one by one: query, key and
    value; gate and up. With `num_experts`, each expert has such a weight, and each row goes to `top_k` experts.
    `input_gradient` is False if nothing before this operation trains (the first layer on pixels).
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

    `qk_dim` and `v_dim` are sizes of one head; in multi-head latent attention they differ. If `causal`, a query attends
    to keys up to its own position: at most `window` of them, and none before its own chunk of `chunk` positions.
    `key_rows` is the number of keys if it differs from the number of rows (cross attention), else None.
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
    """Products of activations, in traced modules: for each sample, `batch` products of m x k by k x n."""

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
    """Any memory-bound operation: nonlinearities, rotary embeddings, residual additions, dropout.

    `fused` is the traffic of one fused kernel, `unfused` the sum over the kernels that plain torch launches. `copies`
    is how often each row occurs (an expert's rows).
    """

    fused: Moves
    unfused: Moves
    cut: Cut = "sequence"
    rows: int | None = None
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(Operation):
    """A lookup of one table row for each position. The table is cut by rows if `sharding` is `row`."""

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

    `positions` are the outputs. A transposed convolution is applied at its inputs; its outputs are `out_positions`.
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
    """Selection of `top_k` of `num_experts` by score, for each row. The scores come from a `Matmul` before it."""

    num_experts: int
    top_k: int
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation(Operation):
    """Rows sent to experts (`dispatch`) or back and summed (`combine`): over ep, an all-to-all of `top_k` copies."""

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
