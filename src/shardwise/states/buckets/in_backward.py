"""Buckets during a backward: those on the host are copied in and out, and those with final gradients are updated.

The accumulated gradients of a bucket on the host are prefetched, and leave when the bucket is full:

    compute    backward of bucket 2 | of 1 | of 0
    in         1                      0                 what the next one's gradients are accumulated into
    sums       2                      1      0
    out                               2      1 ...      once the sum is complete and the next has started

If optimizer state is on the host, buckets are updated during the last backwards of a step:

    backward      of 3 | of 2     | of 1     | of 0     |
    sums               | 3        | 2        | 1        | 0
    updates                       | 3        | 2        | 1 ...

A bucket's gradients are final when its sum over the replicas is complete. The sum starts after its last backward. A sum
that has only just started is not waited for: a bucket is checked when one or two later ones have started theirs, or at
once if there are no other replicas.

All replicas must communicate in the same order, and the order of these updates may differ. So they do not communicate:
what is not complete locally is left to the end of the step, and so is gathering new weights.
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

#: How many sums may be in progress before the oldest goes to the host; and after one that is waited for.
_SUMS_ON_THE_DEVICE, _BEHIND = 1, 1


class OffloadedBackward:
    """The trained buckets of a rank that live on the host, in the order of a backward."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        order = [each for each in buckets if each.is_offloaded]
        self._first = {stage: each for each in reversed(order) for stage in each.key.stages}
        self._next = {one: after for one, after in itertools.pairwise(order) if one.key.stages == after.key.stages}
        self._summed: deque[Bucket] = deque()
        #: Those that this backward is done with. A unit's gradients arrive in any order.
        self._over: set[Bucket] = set()

    def begin_step(self) -> None:
        """Reset at the start of a step."""
        self._summed.clear()

    def begin(self, stage: int) -> None:
        """Start a stage's backward."""
        self._over.clear()
        self._fetch(self._first.get(stage))

    def started(self, bucket: Bucket) -> None:
        """Handle a bucket whose sum has started, after its unit's backward."""
        if bucket.is_offloaded:
            self._is_over(bucket)
            self._summed.append(bucket)
            while len(self._summed) > _SUMS_ON_THE_DEVICE:
                self._summed.popleft().trained.settle()

    def passed(self, bucket: Bucket) -> None:
        """Handle a bucket that a backward has added to, and that is not summed yet."""
        if bucket.trained.has_passed():
            self._is_over(bucket)

    def _is_over(self, bucket: Bucket) -> None:
        """Release the weights of a bucket after its unit's backward, unless they are here for a whole stage."""
        if isinstance(bucket.weights, OffloadedWhole):
            bucket.weights.leave()
        self._over.add(bucket)
        self._fetch(self._next.get(bucket))

    def _fetch(self, bucket: Bucket | None) -> None:
        """Prefetch the accumulated gradients of the next bucket."""
        while bucket is not None and bucket in self._over:
            bucket = self._next.get(bucket)
        if bucket is not None:
            bucket.trained.fetch()


class OptimizerInBackward:
    """The buckets of one rank that are updated early.

    `find_scale` returns the factor on the gradients of a step, as soon as it is known.
    """

    def __init__(self, states: HostStates, find_scale: Callable[[], float | None]) -> None:
        self._states, self._find_scale = states, find_scale
        self._begun: deque[Bucket] = deque()
        self._scale: float | None = None
        #: Whether gradients of buckets on the host are to be kept after the step.
        self.keeps_gradients = False
        #: The buckets whose gradients were given to their optimizers in this step.
        self.done: set[Bucket] = set()

    def begin_step(self) -> None:
        """Reset at the start of a step."""
        self._begun.clear()
        self.done.clear()
        self._scale = None

    def look(self) -> None:
        """Ask for the scale if it is unknown: ranks learn each other's losses only if all of them ask in time."""
        if self._scale is None:
            self._scale = self._find_scale()

    def begun(self, bucket: Bucket) -> None:
        """Handle a bucket whose last sum of this step has started."""
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
    # Shards with copies are summed over them at the end.
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
