"""When whoever is refused should ask again: when those before them will have been answered, at the speed of now."""

from math import ceil

_MOST_SECONDS = 60
#: Speeds are of the last so many seconds at least.
_WINDOW_SECONDS = 1.0


class RetryAfter:
    """Counts requests that come to an end, and those that are refused."""

    def __init__(self) -> None:
        self._since, self._num_ended, self._num_refused = 0.0, 0, 0
        self._ended_per_second = self._refused_per_second = 0.0

    def ended(self, count: int, now: float) -> None:
        self._num_ended += count
        self._turn_over(now)

    def refused(self, num_waiting: int, now: float) -> int:
        """One more is refused, while so many wait. After how many seconds it should ask again.

        Others who were refused come back too: as many as in the last seconds are before it.
        """
        self._num_refused += 1
        self._turn_over(now)
        if not self._ended_per_second:
            return 1
        num_before = num_waiting + self._refused_per_second
        return min(max(ceil(num_before / self._ended_per_second), 1), _MOST_SECONDS)

    def _turn_over(self, now: float) -> None:
        seconds = now - self._since
        if seconds >= _WINDOW_SECONDS:
            self._ended_per_second, self._refused_per_second = self._num_ended / seconds, self._num_refused / seconds
            self._since, self._num_ended, self._num_refused = now, 0, 0
