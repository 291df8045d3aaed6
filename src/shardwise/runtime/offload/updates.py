"""Training with an optimizer on the host: gradients go out while the backward goes on, and updates run beside it.

    device    forward | backward of 3, 2, 1, 0      | forward of 0, 1, 2, 3 | backward ...
    out                  g3  g2  g1  g0
    host                     3   2   1   0 ...
    in                           w3  w2  w1  w0

A bucket of parameters, one block say, is ready when its last gradient is there. A thread takes ready buckets, of
several the one that the next forward uses first: so at the end of a backward the first blocks come before the later
ones that still wait, and the forward can begin while those are updated under it. A block's forward waits for its own
weights and for nothing else. Nothing is stale: the numbers are those of the optimizer without any of this.

Gradients stay on the device until it is their turn, so the host needs room for two buckets of them, not for all.

That is for updates by the host's cores. A GPU is quicker at it even if the state has to come and go: `visits.py`.
"""

import heapq
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RAdam, RMSprop

from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Mark
from shardwise.errors import ShardwiseError, unknown
from shardwise.runtime.offload.bucket import Bucket, DeviceState, HostState, MakeOptimizer, make_buckets
from shardwise.runtime.offload.visits import Visits
from shardwise.runtime.offload.workers import Workers

#: Optimizers that treat every number by itself, so that parameters may be cut into pieces.
_BY_NUMBER = (AdamW, Adam, SGD, NAdam, RAdam, RMSprop, Adagrad)

#: Where what is on the host is updated.
_AT = ("host", "device")


class _Given(NamedTuple):
    """A bucket that is ready: its gradients, and what they are multiplied with; the rate of the step."""

    bucket: Bucket
    gradients: list[Tensor | None]
    scale: float | None
    rate: float | None
    #: Behind all that the device does with the old weights.
    used: Mark


class _Fetched(NamedTuple):
    """A bucket whose gradients are on their way to the host, held until they are there."""

    given: _Given
    slot: int
    mark: Mark


class HostUpdates:
    """An optimizer for a module on a device, with its state, or the larger part of it, on the host.

    It takes the place of the optimizer in a loop: `loss.backward()`, then `step()`. `blocks` are the modules whose
    parameters are updated together. `on_host` is the fraction of numbers whose state is on the host; the rest is where
    the parameters are, of those first that a forward uses first, for their gradients come last and are needed first.
    With `clip` no update begins before the norm of all gradients is known. What is on the host is updated `at` the
    host by its cores, or at the device, for which it comes and goes; a GPU is the quicker of the two. `visiting_bytes`
    of the device's memory are for that: the more, the less of it has to come in under a backward.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        make_optimizer: MakeOptimizer,
        machine: Machine,
        place: str,
        *,
        on_host: float = 1.0,
        clip: float | None = None,
        at: Literal["host", "device"] | None = None,
        visiting_bytes: int | None = None,
    ) -> None:
        if not 0 <= on_host <= 1:
            raise ShardwiseError(f"on_host={on_host} is no fraction", remedy="a number from 0 for none to 1 for all")
        if at not in (None, *_AT):
            raise unknown("place of updates", str(at), _AT)
        _check(make_optimizer)
        self._machine, self._place, self._clip = machine, place, clip
        self._on_gpu = not place.startswith("cpu")
        self._lock = threading.Lock()  # A machine is one thread's at a time.
        self._parameters = list(module.parameters())
        by_unit = make_buckets(module, set(blocks))
        self._buckets = list(by_unit.values())
        on_device = _first(self._buckets, 1 - on_host)
        self._on_device = {each.number: DeviceState(each, make_optimizer) for each in on_device}
        away = [each for each in self._buckets if each.number not in self._on_device]
        visit = at == "device" or (at is None and self._on_gpu)
        self._visits = (
            Visits(away, make_optimizer, machine.pinned, self._copy, self._is_updated, visiting_bytes)
            if visit and away
            else None
        )
        self._workers = Workers()
        self._on_host = {} if visit else {each.number: HostState(each, make_optimizer, self._workers) for each in away}
        self._staging = [self._make_staging() for _ in range(2)] if self._on_host else []
        self._sent: list[list[Mark]] = [[], []]
        self._changed = threading.Condition()
        self._ready: list[int] = []
        self._given: dict[int, _Given] = {}
        #: The learning rate of what is updated from now on; the optimizers' own if it is None.
        self.rate: float | None = None
        #: Buckets that are being updated, and when their new weights are on the device, once that is known.
        self._pending: dict[int, list[Mark] | None] = {}
        self._is_last = True
        self._scale: float | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._hooks = self._make_hooks(module, by_unit)
        self._thread = threading.Thread(target=self._run, name="shardwise-updates", daemon=True)
        self._thread.start()

    @property
    def host_fraction(self) -> float:
        """The part of all numbers whose state is on the host."""
        total = sum(each.size for each in self._buckets)
        here = sum(each.bucket.size for each in self._on_device.values())
        return 1 - here / total if total else 0.0

    def accumulate(self, *, is_last: bool) -> None:
        """Say before a backward whether it is the step's last: until then gradients only add up."""
        self._is_last = is_last

    def step(self) -> None:
        """End a step. Updates run on beside what follows; a forward waits for the weights that it is about to use."""
        self._scale = None if self._clip is None else self._clipping(self._clip)
        for bucket in reversed(self._buckets):
            if bucket.has_gradients:  # All of them where gradients are clipped, else those that were not all used.
                self._give(bucket)
        if self._visits is not None:
            self._visits.end_step()

    def wait(self) -> None:
        """Wait until every weight on the device is new."""
        for number in list(self._pending):
            self._await(number)
        if self._visits is not None:
            self._visits.wait()
        self._raise()
        if self._on_gpu:
            torch.cuda.synchronize(torch.device(self._place))

    def close(self) -> None:
        """Finish, and leave the module alone from now on."""
        try:
            self.wait()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join()
            self._workers.close()
            if self._visits is not None:
                self._visits.close()
            for hook in self._hooks:
                hook.remove()

    def _make_staging(self) -> tuple[Tensor, Tensor]:
        """Room on the host for the gradients of a bucket, and for its new weights."""
        num_bytes = max(each.bucket.size * each.bucket.dtype.itemsize for each in self._on_host.values())
        return self._machine.pinned((num_bytes,), torch.uint8), self._machine.pinned((num_bytes,), torch.uint8)

    def _make_hooks(self, module: nn.Module, by_unit: dict[nn.Module, Bucket]) -> list[Any]:
        numbers = {parameter: each.number for each in self._buckets for parameter in each.parameters}
        hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]
        for unit in module.modules():
            is_block = unit in by_unit and any(True for _ in unit.children())
            own = unit.parameters(recurse=is_block)
            used = sorted({numbers[each] for each in own if each in numbers} - self._on_device.keys())
            if used:
                hooks.append(unit.register_forward_pre_hook(partial(self._before, used)))
        return hooks

    def _arrived(self, bucket: Bucket, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter), "a hook of a parameter"
        if self._is_last and bucket.arrive(parameter) and self._clip is None:
            self._give(bucket)

    def _before(self, numbers: list[int], *_: object) -> None:
        for number in numbers:
            if number in self._pending:
                self._await(number)

    def _await(self, number: int) -> None:
        """Have what is put to compute from now on come after a bucket's update."""
        with self._changed:
            while (marks := self._pending[number]) is None:
                self._raise()
                self._changed.wait(1.0)
            del self._pending[number]
        for mark in marks:
            if self._on_gpu:
                with self._lock:
                    self._machine.follow(self._place, mark)
            else:
                mark.wait()
        self._raise()

    def _give(self, bucket: Bucket) -> None:
        """A bucket has its gradients: update it, or have it updated."""
        state = self._on_device.get(bucket.number)
        if state is not None:
            state.update(self._scale, self.rate)
            return
        with self._lock:
            used = self._machine.mark(self._place)
        self._raise()
        if self._visits is not None:
            with self._changed:
                self._pending[bucket.number] = None
            self._visits.update(bucket, bucket.take(), used, self._scale, self.rate)
            return
        with self._changed:
            self._given[bucket.number] = _Given(bucket, bucket.take(), self._scale, self.rate, used)
            self._pending[bucket.number] = None
            heapq.heappush(self._ready, bucket.number)
            self._changed.notify_all()

    def _clipping(self, limit: float) -> float:
        """What gradients are multiplied with, so that the norm of all of them is at most the limit."""
        norm = torch.nn.utils.get_total_norm([each.grad for each in self._parameters if each.grad is not None])
        return float(torch.clamp(limit / (norm + 1e-6), max=1.0))  # As `clip_grad_norm_` does it, to the last bit.

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
                self._error = error
                self._changed.notify_all()

    def _fetch(self, slot: int, *, waits: bool) -> _Fetched | None:
        with self._changed:
            while waits and not self._ready and not self._closed:
                self._changed.wait()
            if not self._ready:
                return None
            given = self._given.pop(heapq.heappop(self._ready))
        mark = given.used
        room = self._staging[slot][0].view(given.bucket.dtype)
        for gradient, target in zip(given.gradients, given.bucket.views(room), strict=True):
            if gradient is not None:
                mark = self._copy(target, gradient.contiguous().view(-1), [given.used], True)
        return _Fetched(given, slot, mark)

    def _update(self, fetched: _Fetched) -> None:
        (bucket, gradients, scale, rate, used), slot, mark = fetched
        mark.wait()
        has_gradient = [each is not None for each in gradients]
        gradients.clear()
        for sent in self._sent[slot]:
            sent.wait()
        room, weights = (each.view(bucket.dtype)[: bucket.size] for each in self._staging[slot])
        self._on_host[bucket.number].update(room, weights, has_gradient, scale, rate)
        marks = [
            self._copy(parameter.data.view(-1), new, [used], False)
            for parameter, new in zip(bucket.parameters, bucket.views(weights), strict=True)
        ]
        self._sent[slot] = marks[-1:]
        self._is_updated(bucket, marks[-1])

    def _is_updated(self, bucket: Bucket, mark: Mark) -> None:
        """The weights of a bucket are new once a mark is reached."""
        with self._changed:
            self._pending[bucket.number] = [mark]
            self._changed.notify_all()

    def _copy(self, target: Tensor, source: Tensor, after: Sequence[Mark], outward: bool) -> Mark:
        with self._lock:
            if self._on_gpu:
                return self._machine.copy(target, source, after=after)
            ends = {"to": "host", "of": self._place} if outward else {"to": self._place, "of": "host"}
            return self._machine.copy(target, source, after=after, **ends)

    def _raise(self) -> None:
        error = self._error or (self._visits.error if self._visits is not None else None)
        if error is not None:
            raise ShardwiseError(
                f"an update beside the backward failed: {error}", remedy="see the error that this one follows from"
            ) from error


def _first(buckets: Sequence[Bucket], fraction: float) -> list[Bucket]:
    """The buckets that a forward uses first, as many as make up at most this fraction of all numbers."""
    left = fraction * sum(each.size for each in buckets)
    found: list[Bucket] = []
    for bucket in buckets:
        if bucket.size > left:
            break
        left -= bucket.size
        found.append(bucket)
    return found


def _check(make_optimizer: MakeOptimizer) -> None:
    optimizer = make_optimizer([nn.Parameter(torch.zeros(1))])
    if not isinstance(optimizer, _BY_NUMBER):
        raise ShardwiseError(
            f"{type(optimizer).__name__} looks at whole matrices, and on the host parameters are updated in pieces",
            remedy=f"one of {', '.join(each.__name__ for each in _BY_NUMBER)}, or its state on the device: on_host=0",
        )
