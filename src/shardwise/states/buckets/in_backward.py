"""Buckets while a backward goes on: those that live on the host come and go, and those that are final are updated.

What gradients of a bucket on the host are added to comes ahead, and goes when it is full:

    compute    backward of bucket 2 | of 1 | of 0
    in         1                      0                 what the next one's gradients are added to
    sums       2                      1      0
    out                               2      1 ...      of a sum that is there, when the next has begun

Where the state of their optimizer is on the host, buckets are updated while the last backwards of a step go on:

    backward      of 3 | of 2     | of 1     | of 0     |
    sums               | 3        | 2        | 1        | 0
    updates                       | 3        | 2        | 1 ...

A bucket's gradients are final when its sum over the replicas is there, which is begun when its last backward is done.
Nobody waits for a sum that was only just begun: a bucket is looked at when one or two after it have begun theirs, or
at once where there are no other replicas.

All replicas must move numbers in one order, and these updates do not happen in one order. So nothing is moved for them:
what is not complete by itself is left to the end of the step, and so is the gathering of new weights.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.gradients import ScatteredGradients
from shardwise.states.buckets.offloaded_weights import OffloadedWhole
from shardwise.states.tiers.host_states import HostStates

#: How many sums may be under way before the oldest goes to the host; and behind one that is waited for.
_SUMS_ON_THE_DEVICE, _BEHIND = 1, 1


class OffloadedBackward:
    """The trained buckets of a rank that live on the host, in the order of a backward."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        order = [each for each in buckets if each.is_offloaded]
        self._first = {stage: each for each in reversed(order) for stage in each.key.stages}
        self._next = {one: after for one, after in itertools.pairwise(order) if one.key.stages == after.key.stages}
        self._summed: deque[Bucket] = deque()

    def begin_step(self) -> None:
        """Nothing is under way."""
        self._summed.clear()

    def begin(self, stage: int) -> None:
        """A stage's backward begins."""
        _fetch(self._first.get(stage))

    def started(self, bucket: Bucket) -> None:
        """The sum of a bucket has begun: its unit's backward is done."""
        if bucket.is_offloaded:
            self._is_over(bucket)
            self._summed.append(bucket)
            while len(self._summed) > _SUMS_ON_THE_DEVICE:
                self._summed.popleft().trained.settle()

    def passed(self, bucket: Bucket) -> None:
        """A backward has added to a bucket that is not summed yet."""
        bucket.trained.has_passed()
        self._is_over(bucket)

    def _is_over(self, bucket: Bucket) -> None:
        """A unit's backward is done with what lives on the host, unless it is there for a whole stage."""
        if isinstance(bucket.weights, OffloadedWhole):
            bucket.weights.leave()
        _fetch(self._next.get(bucket))


class OptimizerInBackward:
    """The buckets of one rank that are updated early.

    `find_scale` says what the gradients of a step are multiplied with, as soon as that is known.
    """

    def __init__(self, states: HostStates, find_scale: Callable[[], float | None]) -> None:
        self._states, self._find_scale = states, find_scale
        self._begun: deque[Bucket] = deque()
        self._scale: float | None = None
        #: Those of this step whose gradients have been given to their optimizers.
        self.done: set[Bucket] = set()

    def begin_step(self) -> None:
        """Nothing is final yet."""
        self._begun.clear()
        self.done.clear()
        self._scale = None

    def look(self) -> None:
        """Ask for the scale, if it is not known: ranks only know of each other's losses if all of them ask in time."""
        if self._scale is None:
            self._scale = self._find_scale()

    def begun(self, bucket: Bucket) -> None:
        """The last sum of a bucket in this step has begun."""
        if not _is_complete(bucket):
            return
        self._begun.append(bucket)
        self.look()
        behind = _BEHIND if bucket.key.replicas.count > 1 else 0
        while self._scale is not None and len(self._begun) > behind:
            self._update(self._begun.popleft(), self._scale)

    def _update(self, bucket: Bucket, scale: float) -> None:
        bucket.trained.finish(0)
        bucket.scale(scale)
        bucket.give([True] * len(bucket.layout.slots))
        self.done.add(bucket)
        self._states.ready(piece.weight for piece in bucket.pieces)


def _is_complete(bucket: Bucket) -> bool:
    """Whether a bucket's own sum is all that its gradients need, and each parameter in it has one."""
    key = bucket.key
    if key.tie is not None or key.is_partial or len(key.stages) > 1 or not all(bucket.trained.used_in(0)):
        return False
    # Shards that have copies are summed over them at the end.
    return not (isinstance(bucket.gradients, ScatteredGradients) and key.replicas.copies.size > 1)


def _fetch(bucket: Bucket | None) -> None:
    """Have come what the gradients of a bucket are added to, whose turn is next."""
    if bucket is not None:
        bucket.trained.fetch()
