"""How fast a run goes: seconds of each step, and tokens a second since the last line and since the first step."""

from collections.abc import Callable
from time import perf_counter


class Speed:
    """Of a run that begins after the step `first`, with so many tokens in a step."""

    def __init__(self, first: int, *, num_tokens: int, clock: Callable[[], float] = perf_counter) -> None:
        self._num_tokens, self._clock = num_tokens, clock
        self._begin = self._end = self._noted = clock()
        self._told = (first, self._begin)
        #: When the first step was over: in it memory is allocated, and kernels are chosen and compiled.
        self._warm: tuple[int, float] | None = None
        self._first = self._last = first

    def note(self, step: int) -> float:
        """A step is over; the seconds since the one before it."""
        before, self._noted = self._noted, self._clock()
        self._warm = self._warm or (step, self._noted)
        return self._noted - before

    def go_on(self) -> None:
        """What was done between two steps is of neither."""
        self._noted = self._clock()

    def leave_out(self, seconds: float) -> None:
        """So many of the seconds until now were not of the run: somebody looked at it."""
        self._begin, self._noted = self._begin + seconds, self._noted + seconds
        self._told = (self._told[0], self._told[1] + seconds)
        self._warm = self._warm and (self._warm[0], self._warm[1] + seconds)

    def since_told(self, step: int) -> float:
        """Tokens a second since this was last asked."""
        (last, then), self._told = self._told, (step, self._clock())
        return (step - last) * self._num_tokens / (self._told[1] - then)

    def stop(self, step: int) -> None:
        """The last step is over."""
        self._last, self._end = step, self._clock()

    @property
    def seconds(self) -> float:
        """Of all steps, with what was done between them."""
        return self._end - self._begin

    @property
    def tokens_per_second(self) -> float | None:
        """Over all steps but the first; over that one if it is the only one; None if there was none."""
        if self._last == self._first:
            return None
        step, then = self._warm if self._warm and self._warm[0] < self._last else (self._first, self._begin)
        return (self._last - step) * self._num_tokens / (self._end - then)
