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
from collections.abc import Callable, Collection, Sequence

from shardwise.errors import ShardwiseError
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.gradients import ScatteredGradients
from shardwise.states.buckets.offloaded_gradients import OffloadedWholeGradients
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


class OptimizerInBackward:
    """The buckets of one rank that are updated early.

    `find_scale` says what the gradients of a step are multiplied with, as soon as that is known.
    """

    def __init__(self, states: HostStates, find_scale: Callable[[], float | None]) -> None:
        self._states, self._find_scale = states, find_scale
        self._begun: deque[Bucket] = deque()
        self._scale: float | None = None
        #: Whether gradients that would live on the host are to be there after the step.
        self.keeps_gradients = False
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
        if not (_is_complete_by_itself(bucket) and all(bucket.trained.used_in(0))):
            return
        self._begun.append(bucket)
        self.look()
        behind = _BEHIND if bucket.key.replicas.count > 1 else 0
        while self._scale is not None and len(self._begun) > behind:
            self._update(self._begun.popleft(), self._scale)

    def _update(self, bucket: Bucket, scale: float) -> None:
        bucket.trained.hand_over(keeps=self.keeps_gradients)
        bucket.scale(scale)
        if bucket.stays_for_update:
            bucket.host_weights.hold_for_update()
        bucket.give([True] * len(bucket.layout.slots))
        self.done.add(bucket)
        self._states.ready(piece.weight for piece in bucket.pieces)


def _is_complete_by_itself(bucket: Bucket) -> bool:
    """Whether a bucket's own sum is all that its gradients need."""
    key = bucket.key
    if key.tie is not None or key.is_partial or len(key.stages) > 1:
        return False
    # Shards that have copies are summed over them at the end.
    return not (isinstance(bucket.gradients, ScatteredGradients) and key.replicas.copies.size > 1)


def hands_over(bucket: Bucket) -> bool:
    """Whether a bucket that lives on the host is updated with the gradients that its backward leaves on the device."""
    return isinstance(bucket.gradients, OffloadedWholeGradients) and _is_complete_by_itself(bucket)


def refuse_gone(done: Collection[Bucket], name: str) -> None:
    """Refuse to look for the gradient of a parameter that was updated in the backward, if it was not kept."""
    for bucket in done:
        names = [each.name for each in bucket.layout.slots]
        if isinstance(bucket.gradients, OffloadedWholeGradients) and name in names:
            raise ShardwiseError(
                f"the gradient of {name} is gone: with offload.parameters a weight is updated as soon as its gradient"
                " is final, which does not go to the host then",
                remedy="parallelize(..., clip=float('inf')): where a norm is asked for, gradients are kept",
            )
