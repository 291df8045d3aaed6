"""Which weights have their state on the host, and what of them is updated together."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from shardwise.states.parameter_group import ELEMENTWISE
from shardwise.states.tiers.partial_step import weights_of
from shardwise.states.tiers.residency import Visit
from shardwise.states.tiers.staging import ALIGNMENT

#: A weight is not cut for the sake of less than this part of a round.
_LEAST_PART = 1 / 8


@dataclass(eq=False)
class Round:
    """What is updated together."""

    optimizer: Optimizer
    visits: list[Visit] = field(default_factory=list)
    #: Weights of which nobody has said yet that their gradients are final.
    missing: set[nn.Parameter] = field(default_factory=set)
    #: What lies in its slot, in that order: of which visit, and its name.
    lies: list[tuple[int, str]] = field(default_factory=list)
    #: The learning rate of this step; the optimizer's own if it is None.
    rate: float | None = None

    @property
    def weights(self) -> set[nn.Parameter]:
        """The weights that it is about, of some of them perhaps some rows."""
        return {each.weight for each in self.visits}

    def num_bytes(self, number_bytes: float) -> int:
        """What it takes in a slot, with so many bytes for each number."""
        sizes = [each.of(each.weight).numel() * number_bytes for each in self.visits]
        # Each tensor begins at an address that is a multiple of the alignment.
        return sum(int(size) for size in sizes) + ALIGNMENT * len(sizes) * max(int(number_bytes), 1)


def choose(
    sizes: Mapping[nn.Parameter, float], fraction: float, always: Iterable[nn.Parameter] = ()
) -> set[nn.Parameter]:
    """The weights whose state, of these sizes, is on the host: at least this part of all of it, and some always."""
    left = (1 - fraction) * sum(sizes.values())
    found = {each for each in always if each in sizes}
    for weight, size in sizes.items():
        if weight in found:
            continue
        if fraction < 1 and size <= left:
            left -= size
        else:
            found.add(weight)
    return found


def plan_rounds(optimizer: Optimizer, chosen: Collection[nn.Parameter], most: int) -> Iterator[Round]:
    """Rounds of at most so many numbers, of those of an optimizer's weights that were chosen, in its order.

    They are full, so that there are few: a weight that does not fit goes on in the next round, if it can be cut.
    """
    found, left = Round(optimizer), most
    can_cut = type(optimizer) in ELEMENTWISE
    for weight in weights_of(optimizer):
        start = 0
        while weight in chosen and (visit := _part_of(weight, start, left, most, can_cut=can_cut)) is not None:
            size = visit.of(weight).numel()
            if found.visits and size > left:
                yield found
                found, left = Round(optimizer), most
                continue
            found.visits.append(visit)
            left -= size
            if visit.rows is None:
                break
            start = visit.rows.stop
    if found.visits:
        yield found


def _part_of(weight: nn.Parameter, start: int, left: int, most: int, *, can_cut: bool) -> Visit | None:
    """What comes next of a weight, from a row on: all of it, or as many rows as there is room for; None at its end.

    Where there is little room, as much as an empty round has.
    """
    if start == 0 and (not can_cut or not weight.dim() or weight.numel() <= left):
        return Visit(weight, None)
    num_rows = weight.shape[0]
    room = left if left >= _LEAST_PART * most else most
    stop = min(num_rows, start + max(1, room * num_rows // weight.numel()))
    if start == num_rows:
        return None
    return Visit(weight, slice(start, stop) if (start, stop) != (0, num_rows) else None)
