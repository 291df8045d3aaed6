"""The part of a model that one rank computes at once: one microbatch, cut by the axes that cut inside a layer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, Union

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# An integer, or a numpy array with one integer for each candidate. Every formula in `model/` takes both: formulas only
# add, multiply and divide, and never branch on a comparison.
Count: TypeAlias = Union[int, "NDArray[np.int64]"]

# How a tensor is cut over tensor parallel ranks. `tp`: always. `sequence`: only under sequence parallelism, by rows.
# `columns`: inputs of column-parallel weights: as `sequence`, unless they are gathered once and kept.
# `experts`: rows sent to experts: a rank has `expert_tp / tp` of them.
# `whole`: never.
Cut: TypeAlias = Literal["tp", "sequence", "columns", "experts", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One microbatch on one rank.

    `sequence` is the whole sequence, before `cp` cuts it. `sequence_parallel` cuts activations between the tensor
    parallel regions by `tp`. Column-parallel layers gather them; with `gathered_once` they save the gathered tensor for
    the backward instead of gathering it again. `cp` adds `context_kernels` kernels to attention. Experts are spread
    over `ep`, and each is cut by `expert_tp`. `flash` attention saves no scores. `fused` kernels run a chain of
    elementwise operations in one pass. `width` is the bytes of an activation's element.

    Sizes and `sequence_parallel` may be numpy arrays whose shapes broadcast. The other flags describe the software and
    are plain values.
    """

    sequence: Count = 1
    microbatch: Count = 1
    tp: Count = 1
    sequence_parallel: Union[bool, "NDArray[np.bool_]"] = False
    cp: Count = 1
    context_kernels: Count = 0
    ep: Count = 1
    expert_tp: Count = 1
    gathered_once: bool = False
    flash: bool = True
    fused: bool = True
    width: int = 2

    def num_rows(self, rows: int | None) -> Count:
        """Return the rows of a matrix on this rank: `rows` for each sample, or the positions of its sequence."""
        return self.microbatch * (divided(self.sequence, self.cp) if rows is None else rows)

    @property
    def outside(self) -> Count:
        """The divisor of tensors between the tensor parallel regions: `tp` under sequence parallelism, else 1."""
        return 1 + self.sequence_parallel * (self.tp - 1)

    def part(self, count: Count, cut: Cut) -> Count:
        """Return how many of `count` elements one rank has if they are cut in this way."""
        match cut:
            case "tp":
                return divided(count, self.tp)
            case "columns" if self.gathered_once:
                return count
            case "sequence" | "columns":
                return divided(count, self.outside)
            case "experts":
                return divided(count * self.expert_tp, self.tp)
            case "whole":
                return count


def total(counts: Iterable[Count]) -> Count:
    """Return the sum of numbers or arrays."""
    found: Count = 0
    for count in counts:
        found = found + count
    return found


def divided(count: Count, ranks: Count) -> Count:
    """Return the largest part if `count` equal, indivisible items are spread over ranks."""
    return -(-count // ranks)
