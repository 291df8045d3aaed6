"""Updates by the host's cores: gradients go out while the backward goes on, and new weights come back.

    device    forward | backward of 3, 2, 1, 0      | forward of 0, 1, 2, 3 | backward ...
    out                  g3  g2  g1  g0
    host                     3   2   1   0 ...
    in                           w3  w2  w1  w0

A thread takes buckets that are ready, of several the one that the next forward uses first: so at the end of a backward
the first blocks come before the later ones that still wait, and the forward can begin while those are updated under it.

Gradients stay on the device until it is their turn, so the host needs room for two buckets of them, not for all.
"""

import heapq
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import Crossing
from shardwise.states.tiers.update_bucket import Bucket, HostState, MakeOptimizer
from shardwise.states.tiers.workers import Workers


class _Given(NamedTuple):
    """A bucket that is ready: its gradients, and what they are multiplied with; the rate of the step."""

    bucket: Bucket
    gradients: list[Tensor | None]
    scale: float | None
    rate: float | None
    #: Behind all that the device does with the old weights.
    used: list[Event]


class _Fetched(NamedTuple):
    """A bucket whose gradients are on their way to the host, held until they are there."""

    given: _Given
    slot: int
    marks: list[Event]


class AtHost:
    """Buckets with master weights and state on the host, updated there."""

    def __init__(self, buckets: Sequence[Bucket], make_optimizer: MakeOptimizer, crossing: Crossing) -> None:
        self._crossing, self._workers = crossing, Workers()
        self._states = {each.number: HostState(each, make_optimizer, self._workers) for each in buckets}
        num_bytes = max(each.size * each.dtype.itemsize for each in buckets)
        #: Room for the gradients of a bucket, and for its new weights: of one that is updated, and of the next.
        self._staging = [[crossing.pinned((num_bytes,), torch.uint8) for _ in range(2)] for _ in range(2)]
        self._sent: list[list[Event]] = [[], []]
        self._changed = threading.Condition()
        self._ready: list[int] = []
        self._given: dict[int, _Given] = {}
        #: Buckets that are being updated, and when their new weights are on the device, once that is known.
        self._pending: dict[int, list[Event] | None] = {}
        self.error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shardwise-updates", daemon=True)
        self._thread.start()

    def update(self, bucket: Bucket, scale: float | None, rate: float | None) -> None:
        """Have a bucket updated that has its gradients. They are its parameters' no more."""
        self.follow([bucket])
        used = self._crossing.computed()
        with self._changed:
            self._given[bucket.number] = _Given(bucket, bucket.take(), scale, rate, used)
            self._pending[bucket.number] = None
            heapq.heappush(self._ready, bucket.number)
            self._changed.notify_all()

    def follow(self, buckets: Iterable[Bucket]) -> None:
        """What is computed from now on comes after the updates of some buckets."""
        for bucket in buckets:
            with self._changed:
                self._changed.wait_for(
                    lambda bucket=bucket: self.error or self._pending.get(bucket.number, ()) is not None  # type: ignore[misc]
                )
                marks = self._pending.pop(bucket.number, None)
            for mark in marks or ():
                self._crossing.follow(mark)

    def end_step(self) -> None:
        """There is nothing to be expected of the next step."""

    def wait(self) -> None:
        """Wait until all that was asked for is updated."""
        self.follow([each.bucket for each in self._states.values()])

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._workers.close()

    # The thread.

    def _run(self) -> None:
        current: _Fetched | None = None
        try:
            while True:
                if current is None:
                    current = self._fetch(0, waits=True)
                if current is None:
                    return
                # While this one is updated the gradients of another come out.
                following = self._fetch(1 - current.slot, waits=False)
                self._update(current)
                current = following
        except BaseException as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _fetch(self, slot: int, *, waits: bool) -> _Fetched | None:
        with self._changed:
            while waits and not self._ready and not self._is_closed:
                self._changed.wait()
            if not self._ready:
                return None
            given = self._given.pop(heapq.heappop(self._ready))
        room = self._staging[slot][0].view(given.bucket.dtype)
        marks = [
            self._crossing.homeward(target, gradient.contiguous(), given.used)
            for gradient, target in zip(given.gradients, given.bucket.views(room), strict=True)
            if gradient is not None
        ]
        return _Fetched(given, slot, marks[-1:] or given.used)

    def _update(self, fetched: _Fetched) -> None:
        (bucket, gradients, scale, rate, used), slot, marks = fetched
        for mark in [*marks, *self._sent[slot]]:
            mark.wait()
        has_gradient = [each is not None for each in gradients]
        gradients.clear()
        room, weights = (each.view(bucket.dtype)[: bucket.size] for each in self._staging[slot])
        self._states[bucket.number].update(room, weights, has_gradient, scale, rate)
        self._sent[slot] = [
            self._crossing.inward(parameter.data, new, used)
            for parameter, new in zip(bucket.parameters, bucket.views(weights), strict=True)
        ][-1:]
        with self._changed:
            self._pending[bucket.number] = self._sent[slot]
            self._changed.notify_all()
