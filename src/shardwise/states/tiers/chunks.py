"""Chunks: groups of weights with optimizer state on the host that are staged and updated together.

A chunk has some of its optimizer's weights, or some of their rows. So the optimizer steps on substitutes for them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.states.parameter_group import ELEMENTWISE
from shardwise.states.tiers.packing import ALIGNMENT
from shardwise.states.tiers.residency import WeightSlice

#: A weight is not cut for less than this share of a chunk.
_LEAST_PART = 1 / 8


@dataclass(eq=False)
class Chunk:
    """Weights that are updated together."""

    optimizer: Optimizer
    parts: list[WeightSlice] = field(default_factory=list)
    #: Weights whose gradients are not known to be final yet.
    missing: set[nn.Parameter] = field(default_factory=set)
    #: The content of its staging buffer, in order: the index of a part, and the name of the entry.
    staged: list[tuple[int, str]] = field(default_factory=list)
    #: The learning rate of this step; the optimizer's own if it is None.
    rate: float | None = None
    #: The step of training that it is updated in.
    step: int = 0

    @property
    def weights(self) -> set[nn.Parameter]:
        """The weights that it contains, perhaps some rows of them."""
        return {each.weight for each in self.parts}

    def num_bytes(self, number_bytes: float) -> int:
        """Return the bytes in a staging buffer, given the bytes per element."""
        sizes = [each.of(each.weight).numel() * number_bytes for each in self.parts]
        # Each tensor begins at an address that is a multiple of the alignment.
        return sum(int(size) for size in sizes) + ALIGNMENT * len(sizes) * max(int(number_bytes), 1)


def plan_chunks(optimizer: Optimizer, chosen: Collection[nn.Parameter], most: int) -> Iterator[Chunk]:
    """Yield chunks of at most `most` elements, of an optimizer's chosen weights, in its order.

    They are full, so that there are few: a weight that does not fit continues in the next chunk, if it can be cut.
    """
    found, left = Chunk(optimizer), most
    can_cut = type(optimizer) in ELEMENTWISE
    for weight in weights_of(optimizer):
        start = 0
        while weight in chosen and (part := _part_of(weight, start, left, most, can_cut=can_cut)) is not None:
            size = part.of(weight).numel()
            if found.parts and size > left:
                yield found
                found, left = Chunk(optimizer), most
                continue
            found.parts.append(part)
            left -= size
            if part.rows is None:
                break
            start = part.rows.stop
    if found.parts:
        yield found


def _part_of(weight: nn.Parameter, start: int, left: int, most: int, *, can_cut: bool) -> WeightSlice | None:
    """Return the next part of a weight, from a row on: all of it, or as many rows as fit; None at its end.

    If little room is left, as much as fits into an empty chunk.
    """
    if start == 0 and (not can_cut or not weight.dim() or weight.numel() <= left):
        return WeightSlice(weight, None)
    num_rows = weight.shape[0]
    room = left if left >= _LEAST_PART * most else most
    stop = min(num_rows, start + max(1, room * num_rows // weight.numel()))
    if start == num_rows:
        return None
    return WeightSlice(weight, slice(start, stop) if (start, stop) != (0, num_rows) else None)


class Substitute(NamedTuple):
    """What an optimizer steps on instead of a weight, or some rows of it; and its state, if it has one yet."""

    weight: nn.Parameter
    stand_in: nn.Parameter
    state: Mapping[str, Any]


def step_on(optimizer: Optimizer, rate: float | None, substitutes: Sequence[Substitute]) -> list[dict[str, Any]]:
    """Step on substitutes as on their weights, with a learning rate if one is given; return their states."""
    set_rate(optimizer, rate)
    stand_ins: dict[nn.Parameter, list[nn.Parameter]] = {}
    for weight, stand_in, state in substitutes:
        stand_ins.setdefault(weight, []).append(stand_in)
        if state:
            optimizer.state[stand_in] = dict(state)
    groups = [[one for each in group["params"] for one in stand_ins.get(each, ())] for group in optimizer.param_groups]
    with only(optimizer, groups):
        optimizer.step()
    return [optimizer.state.pop(each.stand_in, {}) for each in substitutes]


@contextmanager
def only(optimizer: Optimizer, params: Sequence[list[nn.Parameter]]) -> Iterator[None]:
    """Let an optimizer have only these parameters, by group."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group, mine in zip(optimizer.param_groups, params, strict=True):
            group["params"] = mine
        yield
    finally:
        for group, mine in zip(optimizer.param_groups, before, strict=True):
            group["params"] = mine


def weights_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the weights of an optimizer, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def set_rate(optimizer: Optimizer, rate: float | None) -> None:
    """Set an optimizer's learning rate, if one is given."""
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate


def is_many(value: Any) -> bool:
    """Whether an entry of a state has numbers of a weight. Counts of steps are one number, and may be anywhere."""
    return isinstance(value, Tensor) and value.dim() > 0
