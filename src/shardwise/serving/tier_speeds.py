"""What a block costs, brought from a tier or computed: as measured, or as predicted until it is.

A step of few tokens takes hardly less than one of many, so what a token of it costs says nothing about long prompts.
Steps are kept by their size therefore, to the next power of two:

    a prompt of so many tokens      costs a token
    a step as long was measured     what that cost
    shorter ones alone              what the longest of them cost, were it as long, up to `_FLAT` tokens: too little
                                    rather than too much, as whoever computes then measures it

Of a size the least of the last few counts: some waited for a compiler, a capture, or others.
"""

from collections import deque

#: Up to so many tokens a step may take as long as one of fewer.
_FLAT = 1024
_KEPT = 4


class Speeds:
    """Seconds of blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: Of one block, by tier, late measurements counting most.
        self.seconds: dict[str, float] = {}
        #: Of one token, as it was predicted.
        self.predicted: float | None = None
        self._steps: dict[int, deque[tuple[float, int]]] = {}

    def note(self, tier: str, num_blocks: float, seconds: float) -> None:
        found = seconds / num_blocks
        before = self.seconds.get(tier)
        self.seconds[tier] = found if before is None else 0.8 * before + 0.2 * found

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step that read prompts."""
        kept = self._steps.setdefault(num_tokens.bit_length(), deque(maxlen=_KEPT))
        kept.append((seconds / num_tokens, num_tokens))

    def compute(self, num_blocks: int) -> float | None:
        """Seconds of one of so many blocks that are computed."""
        wanted = num_blocks * self._block_size
        if not self._steps:
            return None if self.predicted is None else self.predicted * self._block_size
        size = min((size for size in self._steps if size >= wanted.bit_length()), default=max(self._steps))
        rate, num_tokens = min(self._steps[size])
        return rate * num_tokens / max(num_tokens, min(wanted, _FLAT)) * self._block_size

    def is_faster(self, tier: str, num_blocks: int) -> bool:
        """Whether so many blocks come sooner than they are computed, as far as both are known."""
        load, compute = self.seconds.get(tier), self.compute(num_blocks)
        return load is None or compute is None or load < compute
