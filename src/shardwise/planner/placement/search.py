"""The search for the best placement: which device each rank sits on, so that what they send takes least time.

Axes take their turns in a step, and the groups of one axis work at once: an axis takes as long as its slowest edge.

    seconds = sum over axes of  bytes on an edge x seconds of a byte on the slowest of its edges

Up to 8 ranks every arrangement is tried that could be better (branch and bound: edges between ranks that sit already
only get more). Beyond, axes are laid out in every order over the devices, nearest first; up to 64 ranks the best of
those is improved by exchanging two ranks as long as that helps.
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

#: Up to so many ranks the search is exact, and up to so many ranks exchange their devices.
EXACT, _EXCHANGING = 8, 64
#: Of two arrangements that take as long, the one whose edges are faster on average is nearer to a better one.
_ON_AVERAGE = 1e-3
_SAME = 1e-9


def seconds_of(edges: Sequence[Edges], ways: Ways, devices: Ints) -> float:
    """What the axes take one after the other, with each rank on its device."""
    return float(sum(_axis(each, ways, devices).max() * each.num_bytes for each in edges))


def search(plan: Plan, edges: Sequence[Edges], ways: Ways) -> Ints:
    """The device of each rank. The plain order, if nothing is better."""
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
    """The plain order; and the axes in every order over the devices, domain by domain.

    Of a domain that does not hold a whole number of blocks of the inner axes, the rest comes at the end, so that as few
    blocks as possible lie in two domains.
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
    """Rank by rank, every free device; given up as soon as what sits already takes as long as the best."""
    count = len(best)
    every = np.arange(count)
    matrix = ways.seconds(every[:, None] + 0 * every[None, :], every[None, :] + 0 * every[:, None]).tolist()
    # For each rank, its edges to ranks before it: the axis and the other end.
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
    """The best exchange of two ranks, again and again."""
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
    """Seconds of many arrangements, and a little of what their edges take on average."""
    total = np.zeros(len(devices))
    for each in edges:
        found = _axis(each, ways, devices)
        total += each.num_bytes * (found.max(axis=1) + _ON_AVERAGE * found.mean(axis=1))
    return total
