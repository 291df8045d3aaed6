"""The cost of a block, reloaded from a tier or recomputed: as measured, or as predicted until it is measured.

A step with few tokens takes hardly less time than one with many, so its cost per token says nothing about long prompts.
Measurements are therefore kept by the size of the step, to the next power of two:

    a prompt of n tokens                     its cost per token
    one of that size or more was measured    the measured cost
    only shorter steps were measured         the time of the longest divided by n, with n at most `_FLAT`: rather too
                                             low than too high, as then it is computed, and so measured

For each size the minimum of the last few counts: some steps waited for a compiler, a capture, or others.
"""

from collections import deque

#: Up to this many tokens, a step may take as long as one with fewer.
_FLAT = 1024
_KEPT = 4


class Speeds:
    """Seconds of blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: Seconds of reloading one block, by tier: a moving average.
        self.seconds: dict[str, float] = {}
        #: Predicted seconds of computing one token.
        self.predicted: float | None = None
        self._steps: dict[int, deque[tuple[float, int]]] = {}

    def note(self, tier: str, num_blocks: float, seconds: float) -> None:
        found = seconds / num_blocks
        before = self.seconds.get(tier)
        self.seconds[tier] = found if before is None else 0.8 * before + 0.2 * found

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Record a step that computed prompts."""
        kept = self._steps.setdefault(num_tokens.bit_length(), deque(maxlen=_KEPT))
        kept.append((seconds / num_tokens, num_tokens))

    def compute(self, num_blocks: int) -> float | None:
        """Return the seconds per block of computing this many blocks."""
        wanted = num_blocks * self._block_size
        if not self._steps:
            return None if self.predicted is None else self.predicted * self._block_size
        size = min((size for size in self._steps if size >= wanted.bit_length()), default=max(self._steps))
        rate, num_tokens = min(self._steps[size])
        return rate * num_tokens / max(num_tokens, min(wanted, _FLAT)) * self._block_size

    def is_faster(self, tier: str, num_blocks: int) -> bool:
        """Whether reloading this many blocks is faster than computing them, as far as both are known."""
        load, compute = self.seconds.get(tier), self.compute(num_blocks)
        return load is None or compute is None or load < compute
