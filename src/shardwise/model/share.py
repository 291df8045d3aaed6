"""What one rank computes of a model at once: one microbatch, cut by the axes that cut inside a layer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, Union

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A whole number, or a numpy array with one for each candidate. Every formula of `model/` takes both: it only adds,
# multiplies and divides, and never asks which is larger.
Count: TypeAlias = Union[int, "NDArray[np.int64]"]

# How a tensor is cut over tensor parallel ranks. `tp`: always. `sequence`: only under sequence parallelism, by rows.
# `columns`: what columns read: as `sequence`, unless it is gathered once and kept.
# `experts`: rows on their way to experts, of which a rank has fewer the less the experts themselves are cut.
# `whole`: never.
Cut: TypeAlias = Literal["tp", "sequence", "columns", "experts", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One microbatch on one rank.

    `sequence` is the whole sequence, before `cp` cuts it. `sequence_parallel` cuts by `tp` what lies between the tensor
    parallel regions; columns gather it, and with `gathered_once` keep it whole for the backward, where others gather it
    again. What `cp` adds to attention is `context_kernels` more. Experts are spread over `ep`, and each is cut by
    `expert_tp`. `flash` attention keeps no scores; `fused` kernels make one pass of a chain of elementwise operations.
    `width` is the bytes of an activation's element.

    Sizes and `sequence_parallel` may be numpy arrays of one shape, or of shapes that broadcast. The other flags say how
    the software works, and are plain.
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
        """Rows of a matrix on this rank: `rows` of each sample, or the positions of its sequence."""
        return self.microbatch * (divided(self.sequence, self.cp) if rows is None else rows)

    @property
    def outside(self) -> Count:
        """What a tensor between the tensor parallel regions is divided by: `tp` under sequence parallelism, else 1."""
        return 1 + self.sequence_parallel * (self.tp - 1)

    def part(self, count: Count, cut: Cut) -> Count:
        """What one rank has of `count` elements that are cut in this way."""
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
    """The sum of numbers or arrays."""
    found: Count = 0
    for count in counts:
        found = found + count
    return found


def divided(count: Count, ranks: Count) -> Count:
    """The largest part when `count` equal things that cannot be cut are spread over ranks."""
    return -(-count // ranks)
