"""When the sum of each bucket's gradients over replicas starts.

It starts as soon as the gradients are there: in the last backward of a step, or in every backward if gradients are
scattered. But all replicas must sum buckets in the same order, and a replica may lack a gradient that others have. So
the order is derived from the schedule alone. A full bucket waits for those before it; a bucket that is not full when
its stage is done is summed with zeros in the gaps.
"""

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ShardwiseError
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.schedule import Schedule
from shardwise.stages.weak_hook import when_accumulated
from shardwise.states.buckets.bucket import Bucket

#: The computations that make gradients of weights.
MAKES_GRADIENTS = (Kind.B, Kind.W)
_BACKWARDS = (Kind.B, Kind.I, Kind.W)


class Reducer:
    """Starts the sums of buckets, in a fixed order. `on_start` is told of each, and whether the stage makes no more.

    `on_pass` is told when a backward has added to a bucket that is not summed yet. `is_final`: whether a gradient must
    not be added to any more, of a bucket whose sum has begun.
    `scatters`: each backward is summed by itself. Without `listens`, gradients are looked for when a stage is done.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        schedule: Schedule,
        ranks: Sequence[int],
        *,
        scatters: bool,
        listens: bool,
        on_start: Callable[[Bucket, bool], None],
        on_pass: Callable[[Bucket], None],
        is_final: Callable[[Bucket], bool],
    ) -> None:
        self._buckets, self._scatters = buckets, scatters
        self._on_start, self._on_pass, self._is_final = on_start, on_pass, is_final
        order = [each for rank in ranks for each in schedule.orders[rank]]
        last: dict[tuple[int, int], Instruction] = {}
        for instruction in order:
            for part in instruction.parts:
                if part.kind in MAKES_GRADIENTS:
                    last[part.stage, schedule.step_of(part.microbatch)] = part
        self._last = frozenset(last.values())
        reduces = [each.stage for each in order if each.kind is Kind.REDUCE and each.peer is None]
        # A bucket that several stages use is complete with the last of them.
        done = {stage: position for position, stage in enumerate(reduces)}
        self._order = sorted(buckets, key=lambda bucket: max(done.get(stage, 0) for stage in bucket.key.stages))
        #: By bucket and step, the stages whose gradients are not complete yet.
        self._left: dict[tuple[Bucket, int], set[int]] = {}
        self._listens = listens
        self._queue: deque[Bucket] = deque()
        self._ready: set[Bucket] = set()
        #: Buckets whose sum has started, in this step or, if each backward is summed, in this backward.
        self._started: set[Bucket] = set()
        self._closing: int | None = None
        #: Whether a step is in progress: gradients that another module's backward leaves here between steps are
        #: dropped.
        self._is_open = False
        #: Whether the current computation makes the last gradients of its stage.
        self._is_last = False
        self._handles: list[RemovableHandle] = []
        if listens:
            for place, bucket in enumerate(buckets):
                for number, parameter in enumerate(bucket.weights.parameters):
                    self._handles.append(when_accumulated(parameter, self._arrived, place, number))

    def begin_step(self) -> None:
        """Reset at the start of a step."""
        if self._listens:  # Otherwise another step may be in progress.
            self._left.clear()
        self._ready.clear()
        self._started.clear()
        self._closing, self._is_open = None, True
        self._queue = deque() if self._scatters else deque(self._order)

    def begin(self, instruction: Instruction) -> None:
        """Start a computation: if it makes gradients, expect them."""
        if instruction.kind not in MAKES_GRADIENTS:
            return
        mine = [bucket for bucket in self._buckets if instruction.stage in bucket.key.stages]
        for bucket in mine:
            bucket.trained.expect()
        if not (self._scatters or instruction in self._last):
            return
        self._closing, self._is_last = instruction.stage, instruction in self._last
        if self._scatters:
            self._queue = deque(mine)
            self._started.difference_update(mine)

    def end(self, instruction: Instruction) -> None:
        """End a computation: if its gradients are scattered, sum all of them now."""
        if self._scatters and instruction.kind in MAKES_GRADIENTS:
            self._ready.update(self._queue)
            self._launch()
        elif not self._scatters and instruction.kind in _BACKWARDS and instruction not in self._last:
            for bucket in self._buckets:
                if instruction.stage in bucket.key.stages:
                    self._on_pass(bucket)
        self._closing = None

    def reduce(self, instruction: Instruction) -> None:
        """Handle a stage whose gradients of a step are complete."""
        if self._scatters:
            return
        stage, step = instruction.stage, instruction.microbatch
        for bucket in self._order:
            if stage in bucket.key.stages:
                left = self._left.setdefault((bucket, step), set(bucket.key.stages))
                left.discard(stage)
                if not left and self._listens:
                    self._ready.add(bucket)
                elif not left:
                    del self._left[bucket, step]
                    self._start(bucket, step)
        self._launch()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def end_step(self) -> None:
        """End a step: all of its gradients are there."""
        self._is_open = False

    def _arrived(self, place: int, number: int, _: Tensor) -> None:
        if not self._is_open:
            return
        bucket = self._buckets[place]
        if bucket in self._started and self._is_final(bucket):
            raise ShardwiseError(
                f"the gradient of {bucket.layout.slots[number].name} was added to after it was complete: a backward"
                " inside of another has made it",
                remedy="torch.utils.checkpoint with use_reentrant=False, or one replica and no offload",
            )
        is_full = bucket.trained.arrive(number)
        if is_full and self._closing is not None and (self._scatters or len(bucket.key.stages) == 1):
            self._ready.add(bucket)
            self._launch()
        elif is_full and self._closing is None and not self._scatters:
            self._on_pass(bucket)

    def _launch(self) -> None:
        while self._queue and self._queue[0] in self._ready:
            bucket = self._queue.popleft()
            self._ready.discard(bucket)
            self._start(bucket, 0)

    def _start(self, bucket: Bucket, step: int) -> None:
        bucket.trained.start(step)
        self._started.add(bucket)
        self._on_start(bucket, self._is_last or not self._scatters)
