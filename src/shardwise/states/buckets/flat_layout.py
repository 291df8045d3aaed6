"""The layout of parameters in a bucket, one after the other, and which elements each rank keeps.

    bucket of 3 parameters, 4 ranks         | a a a a a | b b b | c c c c c c c · |
    what each rank keeps of it              | 0       | 1       | 2     | 3       |

A bucket is contiguous, so that one transfer moves all of it without a copy. It is cut without regard to parameters:
every rank keeps the same number of bytes, however odd the shapes are. Padding (the dot) is always zero, and no piece
includes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.ranks.exchange import Exchange
from shardwise.ranks.mesh import Replicas
from shardwise.states.tiers.packing import pack

# The alignment that the fastest matrix kernels need. No larger: padding is sent between ranks too.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a parameter in its bucket, in elements from the start."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a parameter: elements `start` to `stop`, flattened, which begin at `at` of a shard."""

    slot: Slot
    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The parameters of a bucket, sharded over `num_ranks`. `length` includes padding, and divides by the ranks."""

    slots: tuple[Slot, ...]
    length: int
    num_ranks: int

    @staticmethod
    def of(parameters: Sequence[tuple[str, torch.Size]], dtype: torch.dtype, num_ranks: int) -> "FlatLayout":
        starts, end = pack([shape.numel() for _, shape in parameters], max(1, _ALIGNMENT_BYTES // dtype.itemsize))
        slots = (Slot(name, shape, start) for (name, shape), start in zip(parameters, starts, strict=True))
        return FlatLayout(tuple(slots), -(-end // num_ranks) * num_ranks, num_ranks)

    @property
    def shard_length(self) -> int:
        return self.length // self.num_ranks

    def spans(self, rank: int) -> list[Span]:
        """Return what a rank keeps, parameter by parameter."""
        first = rank * self.shard_length
        found = []
        for slot in self.slots:
            start, stop = max(slot.start, first), min(slot.stop, first + self.shard_length)
            if start < stop:
                found.append(Span(slot, start - slot.start, stop - slot.start, start - first))
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketSpec:
    """The common arguments of a bucket's weights and gradients.

    `channel` is the first of the bucket's channels of the exchange. `parameter_of(name, step)` is the parameter to
    which a step's gradients are added, if weights have two versions, so that two steps are in progress at a time.
    """

    layout: FlatLayout
    parameters: list[nn.Parameter]
    replicas: Replicas
    exchange: Exchange
    channel: int = 0
    parameter_of: Callable[[str, int], nn.Parameter] | None = None
