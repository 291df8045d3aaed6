"""Latency and bandwidth of a link, fitted to the times of messages of several sizes: seconds = latency + bytes / rate.

The fit is robust: the slope is the median of the slopes between all pairs of points (Theil-Sen), each weighted by the
difference in bytes. So neither one delayed message nor the noise of small messages dominates. The spreads are median
absolute deviations, as shares of the value: half of all slopes lie within the spread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: A pair of sizes gives a slope only if one is at least this many times the other.
_APART = 1.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A fitted link. Spreads are shares of the value."""

    latency_seconds: float
    bytes_per_second: float
    latency_spread: float
    rate_spread: float

    def seconds(self, num_bytes: float) -> float:
        """Return the time of a message."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Fit a line to points of (bytes, seconds), of at least two sizes."""
    sizes, seconds = (np.array(each, dtype=np.float64) for each in zip(*points, strict=True))
    low, high = np.nonzero(sizes[None, :] >= _APART * np.maximum(sizes[:, None], 1.0))
    assert len(low), "a line is fitted through messages of one size"
    apart = sizes[high] - sizes[low]
    slopes = np.maximum((seconds[high] - seconds[low]) / apart, 1e-15)
    slope = weighted_median(slopes, apart)
    least = sizes <= max(sizes.min() * 2, 1024)
    fixed = np.maximum(seconds[least] - slope * sizes[least], 1e-9)
    latency = float(np.median(fixed))
    return Line(
        latency_seconds=latency,
        bytes_per_second=1 / slope,
        latency_spread=float(np.median(np.abs(fixed - latency))) / latency,
        rate_spread=weighted_median(np.abs(slopes - slope), apart) / slope,
    )


def weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return the smallest value that has half of the weight at or below it."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
