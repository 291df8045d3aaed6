"""Track which units a forward calls, if it may skip some or call others than on the example.

Examples are layers that are dropped at random, and heads that a batch or an attribute selects. One device runs any of
them, and so does a rank with all units. But all parts of a batch must take the same route: if the rows decide, a part
may decide otherwise than the whole batch. So the routes of microbatches are compared here, and those of replicas by a
hash of a few bits.
"""

from collections.abc import Sequence
from zlib import crc32

from shardwise.errors import ShardwiseError

_BITS = 16


def apart() -> ShardwiseError:
    """Return the error for parts of a batch that call different units."""
    return ShardwiseError(
        "parts of one batch call different units: which units run depends on the data, or on numbers that each part"
        " draws by itself",
        remedy="decide by what all parts have alike: an attribute, a word in the batch, a number drawn from generators"
        " that are seeded alike on all ranks, with microbatches=1; or inside of a unit, for each row",
    )


class Route:
    """The units that the forwards of one batch call, compared with those of the example (`usual`)."""

    def __init__(self, usual: Sequence[str]) -> None:
        self._usual = list(usual)
        self._now: Sequence[str] | None = None

    def begin(self) -> None:
        """Start a batch."""
        self._now = None

    def end(self, called: Sequence[str]) -> None:
        """Record the units that a part of the batch has called."""
        if self._now is not None and called != self._now:
            raise apart()
        self._now = called

    @property
    def bits(self) -> int:
        """A hash of the route; 0 for that of the example."""
        if self._now is None or self._now == self._usual:
            return 0
        return crc32(repr(self._now).encode()) & (1 << _BITS) - 1
