"""Which units a forward calls, where it may leave some out or call others than on the example.

Layers that are dropped at random, heads that a batch or an attribute chooses: one device takes them as they come, and
so does a rank that has all units. But parts of a batch must go one way. Where rows decide, each part would decide by
its own, and the whole batch otherwise; so microbatches are compared here, and replicas by a few bits of their way.
"""

from collections.abc import Sequence
from zlib import crc32

from shardwise.errors import ShardwiseError

_BITS = 16


def apart() -> ShardwiseError:
    """What is said where parts of a batch have called different units."""
    return ShardwiseError(
        "parts of one batch call different units: which units run depends on the data, or on numbers that each part"
        " draws by itself",
        remedy="decide by what all parts have alike: an attribute, a word in the batch, a number drawn from generators"
        " that are seeded alike on all ranks, with microbatches=1; or inside of a unit, for each row",
    )


class Route:
    """The units that forwards of one batch call, beside those of the example."""

    def __init__(self, usual: Sequence[str]) -> None:
        self._usual = list(usual)
        self._now: Sequence[str] | None = None

    def begin(self) -> None:
        """A batch begins."""
        self._now = None

    def end(self, called: Sequence[str]) -> None:
        """A part of it was computed."""
        if self._now is not None and called != self._now:
            raise apart()
        self._now = called

    @property
    def bits(self) -> int:
        """A few bits of the way that was gone: none for that of the example."""
        if self._now is None or self._now == self._usual:
            return 0
        return crc32(repr(self._now).encode()) & (1 << _BITS) - 1
