"""Measure collectives by size over the groups that plans use: inside a domain, across all devices, one device per node.

All groups of a kind run at once, as those of a plan do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.cluster.curve import COLLECTIVES, Curve
from shardwise.probing.steady import goes_on, settled
from shardwise.ranks.collectives import all_gather_single, reduce_scatter_single
from shardwise.training.world import World

#: The most seconds for one size of one collective, approximately.
LIMIT_SECONDS = 0.3
#: Sizes of arrays; on GPUs a larger one too. After a size that takes too long, no larger one is measured.
SIZES: tuple[int, ...] = (4 * 2**10, 32 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20, 64 * 2**20)
_LARGEST = 2**30
_LONG_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """All devices, in groups of one kind."""

    scope: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.groups[0])


def groupings_of(domains: Sequence[Sequence[int]]) -> list[Grouping]:
    """Return the kinds of groups that plans use, for devices in these domains of fast links (or hosts)."""
    smallest, num_domains = min(map(len, domains)), len(domains)
    sizes = [2**power for power in range(1, smallest.bit_length()) if 2**power < smallest]
    found = []
    for size in [*sizes, *([smallest] if smallest > 1 else [])]:
        groups = [
            tuple(each[start : start + size]) for each in domains for start in range(0, len(each) - size + 1, size)
        ]
        found.append(Grouping(scope="inside", groups=tuple(groups)))
    if num_domains > 1 and (smallest > 1 or max(map(len, domains)) > 1):
        found.append(Grouping(scope="across", groups=(tuple(sorted(each for group in domains for each in group)),)))
    if num_domains > 1:
        rails = tuple(tuple(sorted(group[place] for group in domains)) for place in range(smallest))
        found.append(Grouping(scope="rails", groups=rails))
    return found


def measure_collectives(world: World, groupings: Sequence[Grouping]) -> tuple[Curve, ...]:
    """Measure every collective over every kind of group. Every rank calls this."""
    curves = []
    for grouping in groupings:
        mine = None
        for ranks in grouping.groups:  # Every rank must create every group.
            made = dist.new_group(list(ranks))
            if world.rank in ranks:
                mine = made
        group = None if mine is None else world.guarded(mine)
        for name in COLLECTIVES:
            world.wait()
            found = {} if group is None else _measure(world, group, name)
            curve = _curve(grouping, name, world.gather(found))
            if curve is not None:
                curves.append(curve)
        if group is not None:
            dist.destroy_process_group(group)
    return tuple(curves)


def _curve(grouping: Grouping, name: str, found: Sequence[dict[int, float]]) -> Curve | None:
    """Return a curve over the sizes that all groups measured: the slowest rank of a group, the median of groups."""
    common = [size for size in found[grouping.groups[0][0]] if all(size in found[g[0]] for g in grouping.groups)]
    if len(common) < 2:
        return None
    seconds = [median(max(found[rank][size] for rank in ranks) for ranks in grouping.groups) for size in common]
    return Curve(
        collective=name,
        scope=grouping.scope,
        num_devices=grouping.size,
        sizes=tuple(common),
        seconds=tuple(seconds),
    )


def _measure(world: World, group: dist.ProcessGroup, name: str) -> dict[int, float]:
    """Return the seconds of each size on this rank."""
    found: dict[int, float] = {}
    sizes = (*SIZES, _LARGEST) if world.device.type == "cuda" else SIZES
    for size in sizes:
        run = _call(name, size, group, world.device)
        found[size] = _seconds(run, group, world.device)
        if not _agreed(group, found[size] < _LONG_SECONDS / 8 if len(found) > 1 else True):
            break
    return found


def _seconds(run: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    """Time a call until the group's first rank finds the times stable. The first call connects, and does not count."""
    seconds, begun = list[float](), perf_counter()
    while True:
        if not _agreed(group, goes_on(seconds[1:], begun, LIMIT_SECONDS)):
            return settled(seconds[1:]).seconds
        _finish(device)
        start = perf_counter()
        run()
        _finish(device)
        seconds.append(perf_counter() - start)


def _agreed(group: dist.ProcessGroup, goes_on: bool) -> bool:
    """Broadcast the decision of a group's first rank, which also synchronises the group."""
    told = torch.tensor([int(goes_on)])
    dist.broadcast(told, group=group, group_src=0)
    return bool(told.item())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _call(name: str, size: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """Return a call of one collective on an array of about `size` bytes."""
    count = group.size()
    part = torch.zeros(max(size // 4 // count, 1), device=device)
    whole = torch.zeros(part.numel() * count, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": partial(dist.all_reduce, whole, group=group),
        "all-gather": partial(all_gather_single, whole, part, group=group),
        "reduce-scatter": partial(reduce_scatter_single, part, whole, group=group),
        "all-to-all": partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group),
        "broadcast": partial(dist.broadcast, whole, group=group, group_src=0),
        "send-receive": partial(_shift, whole, torch.empty_like(whole), group),
    }
    return calls[name]


def _shift(mine: Tensor, theirs: Tensor, group: dist.ProcessGroup) -> None:
    """Send to the next rank, and receive from the previous one."""
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, mine, after, group=group),
        dist.P2POp(dist.irecv, theirs, before, group=group),
    ])  # fmt: skip
    for work in works:
        work.wait()
