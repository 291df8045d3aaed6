"""Measurements of every pair of devices: which are neighbours, and which links and devices are slower than their kind.

    device   0    1    2    3            neighbours: 0 1 and 2 3
       0          40   10   10           the link 1 -> 2 is slow: 1 where its kind has 10
       1     40        1    10
       2     10   10        40
       3     10   10   40

A kind of link is a level: pairs of neighbours are on the innermost level, pairs of different groups on the next.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Partition = tuple[tuple[int, ...], ...]
#: The rates of two kinds of links differ at least by this factor.
_GAP = 1.5
#: At least this share of the pairs inside groups must have the rate of their level.
_MOST = 0.8
#: A link or device is slow if below this share of its kind's median, and this many median absolute deviations below it.
_SLOW_SHARE, _SLOW_DISTANCES = 0.7, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Bytes/s and the latency in seconds between every two devices, by sender and receiver."""

    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    bytes_per_second: tuple[tuple[float, ...], ...]
    latency_seconds: tuple[tuple[float, ...], ...]

    @property
    def num_devices(self) -> int:
        return len(self.hosts)

    def name(self, device: int) -> str:
        """Return the device's host and name."""
        return f"{self.hosts[device]} {self.devices[device]}"

    def rates(self) -> NDArray[np.float64]:
        return np.array(self.bytes_per_second, dtype=np.float64).reshape(self.num_devices, self.num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A link that is slower than others of its kind."""

    sender: int
    receiver: int
    bytes_per_second: float
    usual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDevice:
    """A device that is slower in `what` than others of its kind."""

    device: int
    what: str
    rate: float
    usual: float


def levels(pairs: Pairs) -> tuple[Partition, ...]:
    """Return the groups of devices at every level of links, innermost first. The last level is one group of all."""
    rates, count = pairs.rates(), pairs.num_devices
    everybody: Partition = (tuple(range(count)),)
    if count < 2:
        return (everybody,)
    # The faster direction of a pair counts. Otherwise a link that is slow in one direction would separate neighbours.
    best = np.maximum(rates, rates.T)
    upper = np.sort(best[np.triu_indices(count, 1)])
    found: list[Partition] = []
    for place in range(len(upper) - 1, 0, -1):
        if upper[place] < _GAP * upper[place - 1]:
            continue
        groups = _components(best >= upper[place])
        if 1 < len(groups) < count and _holds(best >= upper[place], groups):
            found.append(groups)
    return (*found, everybody)


def neighbours(pairs: Pairs) -> Partition:
    """Return the groups of devices that the fastest kind of link connects."""
    return levels(pairs)[0]


def slow_links(pairs: Pairs) -> tuple[SlowLink, ...]:
    """Return links far below the median of their kind, slowest first. Links of slow devices are left out."""
    slow, usual = _slow(pairs)
    whole = {each.device for each in slow_in_links(pairs)}
    rates = pairs.rates()
    found = [
        SlowLink(sender=int(i), receiver=int(j), bytes_per_second=float(rates[i, j]), usual=float(usual[i, j]))
        for i, j in np.argwhere(slow)
        if not whole & {int(i), int(j)}
    ]
    return tuple(sorted(found, key=lambda each: each.bytes_per_second / each.usual))


def slow_in_links(pairs: Pairs) -> tuple[SlowDevice, ...]:
    """Return devices with mostly slow links, or without any fast link although most others have one."""
    rates, count = pairs.rates(), pairs.num_devices
    if count < 4:
        return ()
    best = np.maximum(rates, rates.T)
    np.fill_diagonal(best, -np.inf)
    fastest = best.max(axis=1)
    alone = {group[0] for group in neighbours(pairs) if len(group) == 1}
    slow, usual = _slow(pairs)
    among = (slow | slow.T).sum(axis=1) > (count - 1) / 2
    found = []
    for device in range(count):
        if among[device]:
            mine = np.delete(rates[device], device)
            rate, normal = float(np.median(mine)), float(np.median(np.delete(usual[device], device)))
        elif device in alone and len(alone) <= count // 4:
            rate, normal = float(fastest[device]), float(np.median(fastest))
        else:
            continue
        found.append(SlowDevice(device=device, what="links", rate=rate, usual=normal))
    return tuple(found)


def slow_devices(what: str, rates: list[float]) -> tuple[SlowDevice, ...]:
    """Return the devices, of several of one kind, that are far slower than the median in `what`."""
    values = np.array(rates, dtype=np.float64)
    if len(values) < 3:
        return ()
    usual = float(np.median(values))
    distance = float(np.median(np.abs(values - usual)))
    slow = (values < _SLOW_SHARE * usual) & (usual - values > _SLOW_DISTANCES * distance)
    return tuple(
        SlowDevice(device=int(device), what=what, rate=float(values[device]), usual=usual)
        for device in np.flatnonzero(slow)
    )


def kinds_of_links(pairs: Pairs) -> NDArray[np.int64]:
    """Return the level of each pair: 0 between neighbours."""
    count = pairs.num_devices
    kinds = np.full((count, count), -1, dtype=np.int64)
    for level, groups in enumerate(levels(pairs)):
        label = np.empty(count, dtype=np.int64)
        for number, group in enumerate(groups):
            label[list(group)] = number
        kinds[(label[:, None] == label[None, :]) & (kinds < 0)] = level
    np.fill_diagonal(kinds, -1)
    return kinds


def _slow(pairs: Pairs) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return which links are slow, and for each link the median rate of its kind."""
    rates, kinds = pairs.rates(), kinds_of_links(pairs)
    usual, slow = np.zeros_like(rates), np.zeros(rates.shape, dtype=np.bool_)
    for kind in range(int(kinds.max(initial=-1)) + 1):
        mine = kinds == kind
        if mine.any():
            middle = float(np.median(rates[mine]))
            distance = float(np.median(np.abs(rates[mine] - middle)))
            usual[mine] = middle
            slow |= mine & (rates < _SLOW_SHARE * middle) & (middle - rates > _SLOW_DISTANCES * distance)
    return slow, usual


def _components(joined: NDArray[np.bool_]) -> Partition:
    """Return the connected components."""
    left, found = set(range(len(joined))), []
    while left:
        group, edge = set(), {min(left)}
        while edge:
            group |= edge
            edge = {int(other) for each in edge for other in np.flatnonzero(joined[each])} - group
        found.append(tuple(sorted(group)))
        left -= group
    return tuple(found)


def _holds(joined: NDArray[np.bool_], groups: Partition) -> bool:
    """Return whether nearly all pairs inside groups are connected directly, not just through chains of other pairs."""
    inside = [joined[i, j] for group in groups for i in group for j in group if i < j]
    return bool(np.mean(inside) >= _MOST)
