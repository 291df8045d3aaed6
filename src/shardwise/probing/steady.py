"""How often something is timed, and which of the times counts.

What else runs on a machine makes a time longer, never shorter. So what counts is the lower quartile, and there are
enough of them when three lie together at the lower end; else it goes on until its time is up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

_LEAST, _MOST = 3, 100
#: How near each other the lowest three are, as a share.
_STABLE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A time, how far the others are from it at the median, as a share, and how many there were."""

    seconds: float
    spread: float
    count: int


def settled(seconds: Sequence[float]) -> Steady:
    """What counts of several times."""
    value = sorted(seconds)[(len(seconds) - 1) // 4]
    return Steady(seconds=value, spread=median([abs(each - value) for each in seconds]) / value, count=len(seconds))


def is_stable(seconds: Sequence[float]) -> bool:
    """Whether the lowest three are near each other."""
    lowest = sorted(seconds)[:_LEAST]
    return len(lowest) == _LEAST and lowest[-1] <= (1 + _STABLE) * lowest[0]


def goes_on(seconds: Sequence[float], begun: float, limit_seconds: float) -> bool:
    """Whether to time it once more. `begun` is of `perf_counter`."""
    if is_stable(seconds) or len(seconds) >= _MOST:
        return False
    return len(seconds) < _LEAST or perf_counter() - begun < limit_seconds


def steady(once: Callable[[], float], *, limit_seconds: float) -> Steady:
    """Time something. The first is a warm-up."""
    once()
    begun, seconds = perf_counter(), list[float]()
    while goes_on(seconds, begun, limit_seconds):
        seconds.append(once())
    return settled(seconds)
