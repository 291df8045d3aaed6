"""When a refused client should retry: when the requests before it will be answered, at the current speed."""

from math import ceil

_MOST_SECONDS = 60
#: The shortest window over which speeds are measured.
_WINDOW_SECONDS = 1.0


class RetryAfter:
    """Counts requests that end, and those that are refused."""

    def __init__(self) -> None:
        self._since, self._num_ended, self._num_refused = 0.0, 0, 0
        self._ended_per_second = self._refused_per_second = 0.0

    def ended(self, count: int, now: float) -> None:
        self._num_ended += count
        self._turn_over(now)

    def refused(self, num_waiting: int, now: float) -> int:
        """Count a refusal while this many wait, and return after how many seconds to retry.

        Other refused clients retry too: as many as in the last window are assumed to come first.
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
