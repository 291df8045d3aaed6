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
from collections.abc import Callable, Collection

from shardwise.errors import ShardwiseError
from shardwise.states.buckets.bucket import Bucket
from shardwise.states.buckets.gradients import ScatteredGradients
from shardwise.states.buckets.offloaded_gradients import OffloadedWholeGradients
from shardwise.states.buckets.offloaded_weights import OffloadedWeights
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
        if not (_is_complete_by_itself(bucket) and all(bucket.trained.used)):
            return
        self._begun.append(bucket)
        self.look()
        behind = _BEHIND if bucket.home.replicas.count > 1 else 0
        while self._scale is not None and len(self._begun) > behind:
            self._update(self._begun.popleft(), self._scale)

    def _update(self, bucket: Bucket, scale: float) -> None:
        bucket.trained.hand_over(keeps=self.keeps_gradients)
        bucket.scale(scale)
        if bucket.stays_for_update and isinstance(bucket.weights, OffloadedWeights):
            bucket.weights.hold_for_update()
        bucket.give([True] * len(bucket.layout.slots))
        self.done.add(bucket)
        self._states.ready(piece.weight for piece in bucket.pieces)


def _is_complete_by_itself(bucket: Bucket) -> bool:
    """Whether a bucket's own sum is all that its gradients need."""
    home = bucket.home
    if home.tie is not None or home.is_partial or len(home.stages) > 1:
        return False
    # Shards that have copies are summed over them at the end.
    return not (isinstance(bucket.gradients, ScatteredGradients) and home.replicas.copies.size > 1)


def hands_over(bucket: Bucket) -> bool:
    """Whether a bucket that lives on the host is updated with the gradients that its backward leaves on the device."""
    return isinstance(bucket.gradients, OffloadedWholeGradients) and _is_complete_by_itself(bucket)


def refuse_gone(done: Collection[Bucket], name: str) -> None:
    """Refuse to look for the gradient of a parameter that was updated in the backward, if it was not kept."""
    for bucket in done:
        if isinstance(bucket.gradients, OffloadedWholeGradients) and name in (
            each.name for each in bucket.layout.slots
        ):
            raise ShardwiseError(
                f"the gradient of {name} is gone: with offload.parameters a weight is updated as soon as its gradient"
                " is final, which does not go to the host then",
                remedy="parallelize(..., clip=float('inf')): where a norm is asked for, gradients are kept",
            )
