"""Every pair of devices measured, each way: tiny messages for its latency, long ones for its rate.

A message goes one way and a byte comes back, so both clocks are the sender's. Pairs are measured in rounds, no host in
two of them at once: what hosts share would slow both down. A host's own pairs are measured one after the other.
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

#: One way of one pair takes about so long at most, where a link is not slow.
LIMIT_SECONDS = 1.0
#: Messages of one size take so long together at most.
_SIZE_SECONDS = 0.6
#: A first size tells about how fast a link is; then comes one that should take so long. What starting and answering a
#: message takes, and what buffers on the way swallow, is little beside it.
_FIRST, _LONG_SECONDS, _LARGEST = 2**19, 0.15, 2**28
#: What is below this share of the median of its kind is measured again, so often.
_BEHIND, _AGAIN = 0.95, 2
#: Beyond so many devices, of two hosts only the first devices are measured, and the others are taken to be alike.
_MOST_DEVICES = 64


def rounds_of(hosts: Sequence[str], *, among: set[tuple[int, int]] | None = None) -> list[list[tuple[int, int]]]:
    """Pairs of devices (all, or those `among`) in rounds, no host twice in one."""
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
    """What every device sends to every other. Every rank calls this; `group` is of all of them, and guarded."""
    found: dict[int, tuple[float, float]] = {}
    _measure(world, group, rounds_of(hosts), found)
    pairs = _gathered(world, found, hosts, devices)
    for _ in range(_AGAIN):
        # What else a machine does can make a link look slow. It is named only if it is slow each time.
        _measure(world, group, rounds_of(hosts, among=_behind(pairs)), found)
        pairs = _gathered(world, found, hosts, devices)
    return pairs


def _behind(pairs: Pairs) -> set[tuple[int, int]]:
    """Pairs one of whose ways is slower than is usual of its kind."""
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
    """Measure pairs, round by round. Of a way that was measured before, the better latency and rate stay."""
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
    """What all ranks have found."""
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
    """Seconds of a tiny message one way, and bytes/s of a large one, beyond what the tiny one takes.

    Both are the quickest: whatever else a machine does makes a message later. A line through many sizes is too steep
    or too flat if small ones were held up and large ones not.
    """
    tiny = min(_quickest(world, group, other, 8) for _ in range(3))
    about = _FIRST / max(_quickest(world, group, other, _FIRST) - tiny, 1e-9)
    size = int(min(max(about * _LONG_SECONDS, _FIRST), _LARGEST))
    seconds = _quickest(world, group, other, size)
    dist.send(torch.tensor([0, 0]), other, group=group)
    return tiny / 2, size / max(seconds - tiny, 1e-9)


def _quickest(world: World, group: dist.ProcessGroup, other: int, size: int) -> float:
    """Seconds there, and of the byte back, of the quickest of several: until those at the lower end are stable."""
    message, back = torch.zeros(size, dtype=torch.uint8, device=world.device), torch.zeros(1, dtype=torch.uint8)
    asked, seconds, begun = torch.tensor([1, size]), list[float](), perf_counter()
    while goes_on(seconds[1:], begun, _SIZE_SECONDS):  # The first connects.
        dist.send(asked, other, group=group)
        start = perf_counter()
        dist.send(message, other, group=group)
        dist.recv(back, other, group=group)
        seconds.append(perf_counter() - start)
    return min(seconds[1:])


def _answer(world: World, group: dist.ProcessGroup, other: int) -> None:
    """The other side: take messages and answer each, until none is coming."""
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
