"""Check that parts of a batch compute a loss of the same terms, where each part has the same weight.

A mean over the labels that a mask selects, `cross_entropy(scores[keep], labels[keep])`, and another term beside it: the
mean of such means is that of the batch only if all parts have selected equally many. So has a term that is there only
if some token is. The number of labels of each mean is known when it is computed. It is compared over microbatches here,
and over ranks by sums of n, of a hash s and of s^2 over those that compute losses: n s^2 is s s only if all have one s.
"""

from collections.abc import Sequence
from zlib import crc32

from shardwise.errors import ShardwiseError
from shardwise.stages.loss_kind import REMEDY_OF_MEANS

#: The bits of the hash: products of sums over all ranks must be exact in a double.
_BITS = 18
#: How many numbers a rank adds to the sums.
NUM_TOLD = 3


def uneven() -> ShardwiseError:
    return ShardwiseError(
        "parts of one batch compute means over different numbers of labels (some are selected by a mask, or a term is"
        " there in some parts only), and the loss has other terms too: the mean over parts is not that of the batch",
        remedy=REMEDY_OF_MEANS,
    )


class PartsAlike:
    """The means over labels that the losses of a batch's parts compute: how many, and of how many labels for a row."""

    def __init__(self) -> None:
        self._now: tuple[float, ...] | None = None

    def begin(self) -> None:
        """Start a batch."""
        self._now = None

    def note(self, sizes: Sequence[float]) -> None:
        """Note the means of a part."""
        if self._now is not None and self._now != tuple(sizes):
            raise uneven()
        self._now = tuple(sizes)

    @property
    def numbers(self) -> list[float]:
        """This rank's part of the sums."""
        if self._now is None:
            return [0.0] * NUM_TOLD
        bits = crc32(repr(self._now).encode()) & (1 << _BITS) - 1
        return [1.0, float(bits), float(bits**2)]


def are_parts_alike(told: Sequence[float]) -> bool:
    """Whether the sums over all ranks are those of ranks with the same means."""
    count, total, squares = told
    return total**2 == squares * count
