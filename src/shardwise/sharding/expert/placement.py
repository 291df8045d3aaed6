"""Which rank has which experts, and a better placement for a load that was measured.

experts   0 1 2 3 4 5        slots   0 1 2 | 3 4 5        A slot is a place in the memory of a rank. Rows travel in
ranks     0 0 0 | 1 1 1      experts 0 1 2 | 3 4 5        the order of slots; routers know experts only.
swapped   0 0 1 | 0 1 1              0 1 3 | 2 4 5
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ShardwiseError


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts of every rank, in the order of its slots."""

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))) or not all(self.ranks):
            raise ShardwiseError(
                f"a placement has every expert once and no rank without one, and this is not so: {self.ranks}",
                remedy=f"Placement.even({len(set(self.order))}, {len(self.ranks)})",
            )

    @staticmethod
    def even(num_experts: int, num_ranks: int) -> "Placement":
        """Give each rank consecutive experts. If they do not divide evenly, the first ranks have one more."""
        parts = np.array_split(np.arange(num_experts), num_ranks)
        return Placement(tuple(tuple(part.tolist()) for part in parts))

    @property
    def order(self) -> tuple[int, ...]:
        """The expert in every slot."""
        return tuple(expert for experts in self.ranks for expert in experts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many experts each rank has."""
        return tuple(map(len, self.ranks))

    def peak(self, load: Sequence[float]) -> float:
        """Return the load of the most loaded rank, for which all others wait. An expert has `load[expert]`."""
        return max(float(sum(load[expert] for expert in experts)) for experts in self.ranks)


def balanced(home: Placement, load: Sequence[float]) -> Placement:
    """Return a placement with a lower peak, reached from `home` by greedy swaps, so that few experts move.

    The most loaded rank swaps one expert with another rank, choosing the pair that minimises the larger load of the two
    ranks, while that lowers it. Every rank keeps its number of experts, so parameters keep their shapes. An expert that
    stays keeps its slot.
    """
    places = [list(experts) for experts in home.ranks]
    loads = np.asarray(load, dtype=np.float64)
    while True:
        totals = np.array([loads[experts].sum() for experts in places])
        heavy = int(totals.argmax())
        swap = _best_swap(places, loads, totals, heavy)
        if swap is None:
            return Placement(tuple(_at_home(*each) for each in zip(home.ranks, places, strict=True)))
        light, here, there = swap
        places[heavy][here], places[light][there] = places[light][there], places[heavy][here]


def _at_home(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return the experts of a rank by slot: those that stay keep their slots, and newcomers take the free ones."""
    newcomers = iter([expert for expert in after if expert not in before])
    return tuple(expert if expert in after else next(newcomers) for expert in before)


def _best_swap(
    places: list[list[int]], loads: NDArray[np.float64], totals: NDArray[np.float64], heavy: int
) -> tuple[int, int, int] | None:
    """Return the other rank, then the slots to swap on the most loaded rank and on it; None if no swap helps."""
    best, least = None, float(totals[heavy])
    for light in range(len(places)):
        if light == heavy:
            continue
        less = loads[places[heavy]][:, None] - loads[places[light]][None, :]
        after = np.where(less > 0, np.maximum(totals[heavy] - less, totals[light] + less), np.inf)
        here, there = np.unravel_index(int(after.argmin()), after.shape)
        # Rounding differences of sums in another order are no improvement.
        if after[here, there] < least - 1e-9 * totals[heavy]:
            best, least = (light, int(here), int(there)), float(after[here, there])
    return best
