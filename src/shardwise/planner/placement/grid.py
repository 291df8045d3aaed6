"""The ranks of a plan as a grid: the coordinates of each rank on every axis."""

from collections.abc import Sequence
from math import prod

import numpy as np

from shardwise.cost.numbers import Ints
from shardwise.planner.plan import Plan

#: The axes, outermost first.
ORDER = ("pp", "dp", "cp", "tp")


def sizes_of(plan: Plan) -> dict[str, int]:
    """Return the sizes of the grid. Expert parallel ranks hold dense weights as replicas do: they count as dp."""
    replicas = plan.num_ranks // (plan.pp * plan.cp * plan.tp)
    return {"pp": plan.pp, "dp": replicas, "cp": plan.cp, "tp": plan.tp}


def grid_of(plan: Plan) -> Ints:
    """Return the rank at each coordinate: the dims are those of `ORDER`, ranks are numbered in the plan's order."""
    sizes, order = sizes_of(plan), plan.order.split("-")
    numbered = np.arange(plan.num_ranks).reshape([sizes[axis] for axis in order])
    return numbered.transpose([order.index(axis) for axis in ORDER])


def along(grid: Ints, axes: Sequence[str]) -> Ints:
    """Return the groups of ranks that differ along some axes only: a row for each."""
    inner = [ORDER.index(axis) for axis in axes]
    outer = [number for number in range(grid.ndim) if number not in inner]
    length = prod(grid.shape[number] for number in inner)
    return grid.transpose(*outer, *inner).reshape(-1, length)
