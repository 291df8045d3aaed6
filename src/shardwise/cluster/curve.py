"""Measured collectives: seconds by size and kind of group, and the two bandwidths that nccl-tests defines.

The size of a collective is the size of its whole array: each rank's buffer before an all-reduce, a broadcast or an
all-to-all; the sum of all parts for an all-gather or a reduce-scatter.

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
#: Names, in the order in which they are shown.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-receive")
#: Kinds of group: devices of one domain of fast links; all devices of several domains; one device of each node.
SCOPES = ("inside", "across", "rails")


def bus_factor(collective: str, num_devices: _Number) -> _Number:
    """Return the bytes that the busiest link carries per byte of size. `num_devices` is a number or an array."""
    ring = (num_devices - 1) / num_devices
    if collective in ("broadcast", "send-receive"):
        return 0 * ring + 1.0
    return 2 * ring if collective == "all-reduce" else ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One collective over one kind of group: the seconds of each size, in order of size."""

    collective: str
    scope: str
    num_devices: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def algorithm_rates(self) -> tuple[float, ...]:
        """Return the algorithm bandwidth in bytes/s, for each size."""
        return tuple(size / time for size, time in zip(self.sizes, self.seconds, strict=True))

    def bus_rates(self) -> tuple[float, ...]:
        """Return the bus bandwidth in bytes/s, for each size."""
        factor = bus_factor(self.collective, self.num_devices)
        return tuple(rate * factor for rate in self.algorithm_rates())

    def fit(self) -> Line:
        """Return the latency of a call, and the bus bandwidth of large sizes."""
        factor = bus_factor(self.collective, self.num_devices)
        return fit_line([(size * factor, time) for size, time in zip(self.sizes, self.seconds, strict=True)])
