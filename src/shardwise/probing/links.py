"""Measure every pair of devices in each direction: tiny messages for the latency, long ones for the rate.

A message goes one way and a byte comes back, so that both times are from the sender's clock. Pairs are measured in
rounds with no host in two pairs at once, because what hosts share would slow both down. A host's own pairs are measured
one after the other.
"""

from collections.abc import Sequence
from itertools import combinations
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from shardwise.cluster.pairs import Pairs, kinds_of_links
from shardwise.probing.steady import goes_on
from shardwise.training.world import World

#: The most seconds for one direction of one pair, approximately, if the link is not slow.
LIMIT_SECONDS = 1.0
#: The most seconds for all messages of one size.
_SIZE_SECONDS = 0.6
#: The first size estimates the rate of a link. The next is chosen to take so long that the overhead of starting and
#: answering a message, and what buffers on the way absorb, are small beside it.
_FIRST, _LONG_SECONDS, _LARGEST = 2**19, 0.15, 2**28
#: A rate below this share of the median of its kind is measured again, this many times.
_BEHIND, _AGAIN = 0.95, 2
#: Above this many devices, only the first devices of two hosts are measured, and the others are assumed to be equal.
_MOST_DEVICES = 64


def rounds_of(hosts: Sequence[str], *, among: set[tuple[int, int]] | None = None) -> list[list[tuple[int, int]]]:
    """Return pairs of devices (all, or those `among`) in rounds, with no host twice in one round."""
    first = {host: number for number, host in reversed(list(enumerate(hosts)))}
    everyone = len(hosts) <= _MOST_DEVICES
    left = [
        (i, j)
        for i, j in combinations(range(len(hosts)), 2)
        if (among is None or (i, j) in among)
        and (everyone or hosts[i] == hosts[j] or (first[hosts[i]] == i and first[hosts[j]] == j))
    ]
    rounds = []
    while left:
        busy, now, later = set[str](), [], []
        for i, j in left:
            if busy.isdisjoint((hosts[i], hosts[j])):
                busy |= {hosts[i], hosts[j]}
                now.append((i, j))
            else:
                later.append((i, j))
        rounds.append(now)
        left = later
    return rounds


def measure_pairs(world: World, group: dist.ProcessGroup, hosts: Sequence[str], devices: Sequence[str]) -> Pairs:
    """Measure every device to every other. Every rank calls this; `group` has all of them, and is guarded."""
    found: dict[int, tuple[float, float]] = {}
    _measure(world, group, rounds_of(hosts), found)
    pairs = _gathered(world, found, hosts, devices)
    for _ in range(_AGAIN):
        # Other load on a machine can make a link look slow. It is reported only if it is slow each time.
        _measure(world, group, rounds_of(hosts, among=_behind(pairs)), found)
        pairs = _gathered(world, found, hosts, devices)
    return pairs


def _behind(pairs: Pairs) -> set[tuple[int, int]]:
    """Return the pairs with a direction that is slower than usual for its kind."""
    rates, kinds = pairs.rates(), kinds_of_links(pairs)
    found = set[tuple[int, int]]()
    for kind in range(int(kinds.max(initial=-1)) + 1):
        mine = kinds == kind
        slow = mine & (rates < _BEHIND * np.median(rates[mine])) if mine.any() else mine
        found |= {(int(min(i, j)), int(max(i, j))) for i, j in np.argwhere(slow)}
    return found


def _measure(
    world: World, group: dist.ProcessGroup, rounds: list[list[tuple[int, int]]], found: dict[int, tuple[float, float]]
) -> None:
    """Measure pairs, round by round. If a direction was measured before, the better latency and rate are kept."""
    for pairs in rounds:
        mine = next((pair for pair in pairs if world.rank in pair), None)
        for sends_first in (True, False):
            world.wait()
            if mine is None:
                continue
            other = mine[1] if world.rank == mine[0] else mine[0]
            if (world.rank == mine[0]) == sends_first:
                latency, rate = _send(world, group, other)
                before = found.get(other, (latency, rate))
                found[other] = min(latency, before[0]), max(rate, before[1])
            else:
                _answer(world, group, other)


def _gathered(
    world: World, found: dict[int, tuple[float, float]], hosts: Sequence[str], devices: Sequence[str]
) -> Pairs:
    """Gather the measurements of all ranks."""
    rows: list[dict[int, tuple[float, float]]] = world.gather(found)
    first = {host: number for number, host in reversed(list(enumerate(hosts)))}

    def at(i: int, j: int) -> tuple[float, float]:
        if i == j:
            return 0.0, 0.0
        return rows[i][j] if j in rows[i] else rows[first[hosts[i]]][first[hosts[j]]]

    count = range(len(hosts))
    return Pairs(
        hosts=tuple(hosts),
        devices=tuple(devices),
        bytes_per_second=tuple(tuple(at(i, j)[1] for j in count) for i in count),
        latency_seconds=tuple(tuple(at(i, j)[0] for j in count) for i in count),
    )


def _send(world: World, group: dist.ProcessGroup, other: int) -> tuple[float, float]:
    """Return the seconds of a tiny message one way, and bytes/s of a large one, without the time of the tiny one.

    Both are minima, because other load only makes messages slower. A line fitted through many sizes would be too steep
    or too flat if small messages were delayed and large ones not.
    """
    tiny = min(_quickest(world, group, other, 8) for _ in range(3))
    about = _FIRST / max(_quickest(world, group, other, _FIRST) - tiny, 1e-9)
    size = int(min(max(about * _LONG_SECONDS, _FIRST), _LARGEST))
    seconds = _quickest(world, group, other, size)
    dist.send(torch.tensor([0, 0]), other, group=group)
    return tiny / 2, size / max(seconds - tiny, 1e-9)


def _quickest(world: World, group: dist.ProcessGroup, other: int, size: int) -> float:
    """Return the fewest seconds of a message there and a byte back, repeated until the lowest times are stable."""
    message, back = torch.zeros(size, dtype=torch.uint8, device=world.device), torch.zeros(1, dtype=torch.uint8)
    asked, seconds, begun = torch.tensor([1, size]), list[float](), perf_counter()
    while goes_on(seconds[1:], begun, _SIZE_SECONDS):  # The first message connects.
        dist.send(asked, other, group=group)
        start = perf_counter()
        dist.send(message, other, group=group)
        dist.recv(back, other, group=group)
        seconds.append(perf_counter() - start)
    return min(seconds[1:])


def _answer(world: World, group: dist.ProcessGroup, other: int) -> None:
    """The receiving side: receive messages and answer each, until the sender ends."""
    asked, back = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.uint8)
    message = torch.empty(0, dtype=torch.uint8, device=world.device)
    while True:
        dist.recv(asked, other, group=group)
        goes_on, size = asked.tolist()
        if not goes_on:
            return
        if len(message) != size:
            message = torch.empty(size, dtype=torch.uint8, device=world.device)
        dist.recv(message, other, group=group)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        dist.send(back, other, group=group)
