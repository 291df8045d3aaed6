"""Search for the best placement: a device for each rank, such that communication takes the least time.

The axes of a step communicate one after the other, and the groups of one axis at once. So an axis takes as long as its
slowest edge.

    seconds = sum over axes of  bytes on an edge x seconds of a byte on the slowest of its edges

For up to 8 ranks the search is exact (branch and bound: the time of placed ranks only grows). Beyond, axes are laid out
in every order over the devices, nearest first. For up to 64 ranks the best of those is improved by swapping pairs of
ranks as long as that helps.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import inf

import numpy as np

from shardwise.cost.numbers import Floats, Ints
from shardwise.planner.placement.grid import ORDER, grid_of
from shardwise.planner.placement.traffic import Edges
from shardwise.planner.placement.ways import Ways
from shardwise.planner.plan import Plan

#: The search is exact up to the first number of ranks, and swaps pairs up to the second.
EXACT, _EXCHANGING = 8, 64
#: Of two arrangements with equal times, the one whose edges are faster on average is closer to a better one.
_ON_AVERAGE = 1e-3
_SAME = 1e-9


def seconds_of(edges: Sequence[Edges], ways: Ways, devices: Ints) -> float:
    """Return the time of all axes, one after the other, with each rank on its device."""
    return float(sum(_axis(each, ways, devices).max() * each.num_bytes for each in edges))


def search(plan: Plan, edges: Sequence[Edges], ways: Ways) -> Ints:
    """Return the device of each rank, in the plain order if nothing is better."""
    plain = np.arange(plan.num_ranks)
    if not edges:
        return plain
    best = min(_laid_out(plan, ways), key=lambda each: seconds_of(edges, ways, each))
    if len(plain) <= EXACT:
        best = _exact(edges, ways, best)
    elif len(plain) <= _EXCHANGING:
        best = _exchanged(edges, ways, best)
    gains = seconds_of(edges, ways, best) < (1 - _SAME) * seconds_of(edges, ways, plain)
    return best if gains else plain


def _axis(each: Edges, ways: Ways, devices: Ints) -> Floats:
    return ways.seconds(devices[..., each.senders], devices[..., each.receivers])


def _laid_out(plan: Plan, ways: Ways) -> Iterator[Ints]:
    """Yield the plain order, then the axes in every order over the devices, domain by domain.

    If a domain does not hold a whole number of blocks of the inner axes, its remaining devices come last, so that as
    few blocks as possible span two domains.
    """
    grid = grid_of(plan)
    yield np.arange(plan.num_ranks)
    by_domain = [np.flatnonzero(ways.domain == label) for label in np.unique(ways.domain)]
    long = [axis for axis, size in zip(ORDER, grid.shape, strict=True) if size > 1]
    for order in permutations(long):
        ranks = grid.transpose([ORDER.index(axis) for axis in (*[a for a in ORDER if a not in order], *order)]).ravel()
        block = 1
        for axis in reversed(order):
            block *= grid.shape[ORDER.index(axis)]
            whole = [each[: len(each) // block * block] for each in by_domain]
            rest = [each[len(each) // block * block :] for each in by_domain]
            devices = np.empty(plan.num_ranks, dtype=np.int64)
            devices[ranks] = np.concatenate([*whole, *rest])
            yield devices


def _exact(edges: Sequence[Edges], ways: Ways, best: Ints) -> Ints:
    """Try every free device for rank after rank; give up as soon as the placed ranks take as long as the best."""
    count = len(best)
    every = np.arange(count)
    matrix = ways.seconds(every[:, None] + 0 * every[None, :], every[None, :] + 0 * every[:, None]).tolist()
    # The edges of each rank to earlier ranks: the axis and the other end.
    before: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for number, each in enumerate(edges):
        for pair in {
            (max(a, b), min(a, b)) for a, b in zip(each.senders.tolist(), each.receivers.tolist(), strict=True)
        }:
            before[pair[0]].append((number, pair[1]))
    weights = [each.num_bytes for each in edges]
    found, least = best.tolist(), seconds_of(edges, ways, best)
    seats: list[int] = []

    def go_on(slowest: list[float]) -> None:
        nonlocal found, least
        if len(seats) == count:
            least, found = sum(weight * slow for weight, slow in zip(weights, slowest, strict=True)), list(seats)
            return
        for device in range(count):
            if device in seats:
                continue
            now = list(slowest)
            for axis, other in before[len(seats)]:
                now[axis] = max(now[axis], matrix[device][seats[other]])
            if sum(weight * slow for weight, slow in zip(weights, now, strict=True)) < least * (1 - _SAME):
                seats.append(device)
                go_on(now)
                seats.pop()

    if least < inf:
        go_on([0.0] * len(edges))
    return np.array(found)


def _exchanged(edges: Sequence[Edges], ways: Ways, best: Ints) -> Ints:
    """Apply the best swap of two ranks, repeatedly."""
    count = len(best)
    first, second = np.triu_indices(count, 1)
    now, value = best, _guide(edges, ways, best[None])[0]
    for _ in range(4 * count):
        tried = np.repeat(now[None], len(first), axis=0)
        each = np.arange(len(first))
        tried[each, first], tried[each, second] = now[second], now[first]
        values = _guide(edges, ways, tried)
        at = int(values.argmin())
        if values[at] >= value * (1 - _SAME):
            break
        now, value = tried[at], values[at]
    return now


def _guide(edges: Sequence[Edges], ways: Ways, devices: Ints) -> Floats:
    """Return the times of many arrangements, plus a small share of the average time of their edges."""
    total = np.zeros(len(devices))
    for each in edges:
        found = _axis(each, ways, devices)
        total += each.num_bytes * (found.max(axis=1) + _ON_AVERAGE * found.mean(axis=1))
    return total
