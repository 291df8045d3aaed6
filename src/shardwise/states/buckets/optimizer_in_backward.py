"""Buckets that are updated while the last backwards of a step go on, where the state of their optimizer is on the host.

    backward      of 3 | of 2     | of 1     | of 0     |
    sums               | 3        | 2        | 1        | 0
    updates                       | 3        | 2        | 1 ...

A bucket's gradients are final when its sum over the replicas is there, which is begun when its last backward is done.
Nobody waits for a sum that was only just begun: a bucket is looked at when one or two after it have begun theirs, or
at once where there are no other replicas.

All replicas must move numbers in one order, and these updates do not happen in one order. So nothing is moved for them:
what is not complete by itself is left to the end of the step, and so is the gathering of new weights.
"""

from collections import deque
from collections.abc import Callable

from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.gradients import ScatteredGradients
from shardwise.states.tiers.host_states import HostStates

#: How many sums may be under way behind one that is waited for.
_BEHIND = 1


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
        behind = _BEHIND if bucket.home.replicas.count > 1 else 0
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
    home = bucket.home
    if home.tie is not None or home.is_partial or len(home.stages) > 1 or not all(bucket.trained.used):
        return False
    # Shards that have copies are summed over them at the end.
    return not (isinstance(bucket.gradients, ScatteredGradients) and home.replicas.copies.size > 1)
