"""Buckets that live on the host, in a backward: what gradients are added to comes ahead, and goes when it is full.

compute    backward of bucket 2 | of 1 | of 0
in         1                      0                 what the next one's gradients are added to
sums       2                      1      0
out                               2      1 ...      of a sum that is there, when the next has begun
"""

import itertools
from collections import deque
from collections.abc import Sequence

from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.offloaded_weights import OffloadedWhole

#: How many sums may be under way before the oldest goes to the host.
_SUMS_ON_THE_DEVICE = 1


class OffloadedBackward:
    """The trained buckets of a rank that live on the host, in the order of a backward."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        order = [each for each in buckets if each.is_offloaded]
        self._first = {stage: each for each in reversed(order) for stage in each.home.stages}
        self._next = {one: after for one, after in itertools.pairwise(order) if one.home.stages == after.home.stages}
        self._summed: deque[Bucket] = deque()
        #: Those that this backward is done with. A unit's gradients arrive in an order of their own.
        self._over: set[Bucket] = set()

    def begin_step(self) -> None:
        """Nothing is under way."""
        self._summed.clear()

    def begin(self, stage: int) -> None:
        """A stage's backward begins."""
        self._over.clear()
        self._fetch(self._first.get(stage))

    def started(self, bucket: Bucket) -> None:
        """The sum of a bucket has begun: its unit's backward is done."""
        if bucket.is_offloaded:
            self._is_over(bucket)
            self._summed.append(bucket)
            while len(self._summed) > _SUMS_ON_THE_DEVICE:
                self._summed.popleft().trained.settle()

    def passed(self, bucket: Bucket) -> None:
        """A backward has added to a bucket that is not summed yet."""
        if bucket.trained.has_passed():
            self._is_over(bucket)

    def _is_over(self, bucket: Bucket) -> None:
        """A unit's backward is done with what lives on the host, unless it is there for a whole stage."""
        if isinstance(bucket.weights, OffloadedWhole):
            bucket.weights.leave()
        self._over.add(bucket)
        self._fetch(self._next.get(bucket))

    def _fetch(self, bucket: Bucket | None) -> None:
        """Have come what gradients are added to, of the bucket whose turn is next."""
        while bucket is not None and bucket in self._over:
            bucket = self._next.get(bucket)
        if bucket is not None:
            bucket.trained.fetch()
