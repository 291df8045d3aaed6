"""How often to repeat a measurement, and which of the times to use.

Other load on a machine makes a time longer, never shorter. So the lower quartile is used. Repetition stops when the
three lowest times are close together, or when the time limit is reached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

_LEAST, _MOST = 3, 100
#: The largest relative difference of the three lowest times that counts as stable.
_STABLE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The time used, the median relative distance of the others from it, and how many there were."""

    seconds: float
    spread: float
    count: int


def settled(seconds: Sequence[float]) -> Steady:
    """Return the time to use of several."""
    value = sorted(seconds)[(len(seconds) - 1) // 4]
    return Steady(seconds=value, spread=median([abs(each - value) for each in seconds]) / value, count=len(seconds))


def is_stable(seconds: Sequence[float]) -> bool:
    """Whether the three lowest are close together."""
    lowest = sorted(seconds)[:_LEAST]
    return len(lowest) == _LEAST and lowest[-1] <= (1 + _STABLE) * lowest[0]


def goes_on(seconds: Sequence[float], begun: float, limit_seconds: float) -> bool:
    """Whether to repeat the measurement. `begun` is a time of `perf_counter`."""
    if is_stable(seconds) or len(seconds) >= _MOST:
        return False
    return len(seconds) < _LEAST or perf_counter() - begun < limit_seconds


def steady(once: Callable[[], float], *, limit_seconds: float) -> Steady:
    """Time something repeatedly. The first run is a warm-up."""
    once()
    begun, seconds = perf_counter(), list[float]()
    while goes_on(seconds, begun, limit_seconds):
        seconds.append(once())
    return settled(seconds)
