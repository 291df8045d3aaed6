"""Measured collectives: seconds by size, over which devices, and the two bandwidths as nccl-tests define them.

The size of a collective is that of its whole array: what every rank holds before an all-reduce, a broadcast or an
all-to-all, all parts together of an all-gather or a reduce-scatter.

    algorithm bandwidth = size / seconds
    bus bandwidth       = algorithm bandwidth x factor      what each link carries, whatever the number of ranks

(nccl-tests, doc/PERFORMANCE.md.)
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from shardwise.cluster.line import Line, fit_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Number = TypeVar("_Number", float, "NDArray[np.float64]")
#: By name, in the order in which they are shown.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-receive")
#: Over which devices: some of one domain of fast links; all of several; one of each node.
SCOPES = ("inside", "across", "rails")


def bus_factor(collective: str, num_devices: _Number) -> _Number:
    """Bytes that the busiest link carries, for each byte of the size. Of one number of devices, or of many."""
    ring = (num_devices - 1) / num_devices
    if collective in ("broadcast", "send-receive"):
        return 0 * ring + 1.0
    return 2 * ring if collective == "all-reduce" else ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One collective over one kind of group: the seconds of each size, sizes rising."""

    collective: str
    scope: str
    num_devices: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def algorithm_rates(self) -> tuple[float, ...]:
        """Bytes/s of the array, for each size."""
        return tuple(size / time for size, time in zip(self.sizes, self.seconds, strict=True))

    def bus_rates(self) -> tuple[float, ...]:
        """Bytes/s of a link, for each size."""
        factor = bus_factor(self.collective, self.num_devices)
        return tuple(rate * factor for rate in self.algorithm_rates())

    def fit(self) -> Line:
        """Seconds of a call, and the bus bandwidth of a long one."""
        factor = bus_factor(self.collective, self.num_devices)
        return fit_line([(size * factor, time) for size, time in zip(self.sizes, self.seconds, strict=True)])
