"""The speed of a run: seconds of each step, and tokens/s since the last progress line and since the first step."""

from collections.abc import Callable
from time import perf_counter


class Speed:
    """The speed of a run that begins after the step `first`, with `num_tokens` tokens a step."""

    def __init__(self, first: int, *, num_tokens: int, clock: Callable[[], float] = perf_counter) -> None:
        self._num_tokens, self._clock = num_tokens, clock
        self._begin = self._end = self._noted = clock()
        self._told = (first, self._begin)
        #: The end of the first step, which allocates memory and selects and compiles kernels.
        self._warm: tuple[int, float] | None = None
        self._first = self._last = first

    def note(self, step: int) -> float:
        """Record the end of a step. Return the seconds since the previous one."""
        before, self._noted = self._noted, self._clock()
        self._warm = self._warm or (step, self._noted)
        return self._noted - before

    def go_on(self) -> None:
        """Exclude the time since the last step from the next one: it was spent between steps."""
        self._noted = self._clock()

    def leave_out(self, seconds: float) -> None:
        """Exclude these seconds, which were spent on observing the run."""
        self._begin, self._noted = self._begin + seconds, self._noted + seconds
        self._told = (self._told[0], self._told[1] + seconds)
        self._warm = self._warm and (self._warm[0], self._warm[1] + seconds)

    def since_told(self, step: int) -> float:
        """Return tokens/s since the last call."""
        (last, then), self._told = self._told, (step, self._clock())
        return (step - last) * self._num_tokens / (self._told[1] - then)

    def stop(self, step: int) -> None:
        """Record the end of the last step."""
        self._last, self._end = step, self._clock()

    @property
    def seconds(self) -> float:
        """The duration of all steps, with the work between them."""
        return self._end - self._begin

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens/s over all steps but the first; over the first if it is the only one; None if there was none."""
        if self._last == self._first:
            return None
        step, then = self._warm if self._warm and self._warm[0] < self._last else (self._first, self._begin)
        return (self._last - step) * self._num_tokens / (self._end - then)
