"""Training with an optimizer on the host: updates run beside the backward and under the next forward.

A bucket of parameters, one block say, is ready when its last gradient is there, and then it is updated: at the device
(`device_updates.py`), or by the host's cores (`cpu_updates.py`), or where it is if its state has not gone. A block's
forward waits for its own weights and for nothing else. Nothing is stale: the numbers are those of the optimizer without
any of this.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwise.cost.memory import SLOT_BYTES
from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError, unknown
from shardwise.states.parameter_group import ELEMENTWISE
from shardwise.states.tiers.copy_streams import Crossing
from shardwise.states.tiers.cpu_updates import AtHost
from shardwise.states.tiers.device_updates import AtDevice
from shardwise.states.tiers.staging import PART_OF_ALL
from shardwise.states.tiers.update_bucket import Bucket, DeviceState, MakeOptimizer, make_buckets

#: Where what is on the host is updated.
_AT = ("host", "device")


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
        self._clip, self._parameters = clip, list(module.parameters())
        by_unit = make_buckets(module, set(blocks))
        self._buckets = list(by_unit.values())
        self._on_device = {each: DeviceState(each, make_optimizer) for each in _first(self._buckets, 1 - on_host)}
        on_gpu = not place.startswith("cpu")
        self._device = torch.device(place if on_gpu else "cpu")
        self._crossing = Crossing(self._device, machine, place)
        self._away: AtDevice | AtHost | None = None
        away = [each for each in self._buckets if each not in self._on_device]
        if away and (at == "device" or (at is None and on_gpu)):
            room = _visiting_bytes(self._device) if visiting_bytes is None else visiting_bytes
            self._away = AtDevice(away, make_optimizer, self._crossing, room)
        elif away:
            _check(make_optimizer)
            self._away = AtHost(away, make_optimizer, self._crossing)
        #: The learning rate of what is updated from now on; the optimizers' own if it is None.
        self.rate: float | None = None
        self._is_last = True
        self._scale: float | None = None
        self._hooks = self._make_hooks(module, by_unit)

    @property
    def host_fraction(self) -> float:
        """The part of all numbers whose state is on the host."""
        total = sum(each.size for each in self._buckets)
        return 1 - sum(each.size for each in self._on_device) / total if total else 0.0

    def accumulate(self, *, is_last: bool) -> None:
        """Say before a backward whether it is the step's last: until then gradients only add up."""
        self._is_last = is_last

    def step(self) -> None:
        """End a step. Updates run on beside what follows; a forward waits for the weights that it is about to use."""
        self._scale = None if self._clip is None else self._clipping(self._clip)
        for bucket in self._buckets:
            if bucket.has_gradients:  # All of them where gradients are clipped, else those that were not all used.
                self._update(bucket)
        if self._away is not None:
            self._away.end_step()

    def wait(self) -> None:
        """Wait until every weight on the device is new, and all state is at home."""
        if self._away is not None:
            self._away.wait()
        self._raise()
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Finish, and leave the module alone from now on."""
        try:
            self.wait()
        finally:
            if self._away is not None:
                self._away.close()
            self._crossing.close()
            for hook in self._hooks:
                hook.remove()

    def _make_hooks(self, module: nn.Module, by_unit: dict[nn.Module, Bucket]) -> list[Any]:
        bucket_of = {parameter: each for each in self._buckets for parameter in each.parameters}
        hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))  # type: ignore[no-untyped-call]
            for parameter, bucket in bucket_of.items()
        ]
        for unit in module.modules():
            is_block = unit in by_unit and any(True for _ in unit.children())
            own = unit.parameters(recurse=is_block)
            used = {bucket_of[each]: None for each in own if each in bucket_of}
            away = [each for each in used if each not in self._on_device]
            if away:
                hooks.append(unit.register_forward_pre_hook(partial(self._before, away)))
        return hooks

    def _arrived(self, bucket: Bucket, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter), "a hook of a parameter"
        if self._is_last and bucket.arrive(parameter) and self._clip is None:
            self._update(bucket)

    def _before(self, buckets: list[Bucket], *_: object) -> None:
        assert self._away is not None, "some are away"
        self._away.follow(buckets)
        self._raise()

    def _update(self, bucket: Bucket) -> None:
        """A bucket has its gradients: update it, or have it updated."""
        state = self._on_device.get(bucket)
        if state is not None:
            state.update(self._scale, self.rate)
            return
        assert self._away is not None, "it is away"
        self._raise()
        self._away.update(bucket, self._scale, self.rate)

    def _clipping(self, limit: float) -> float:
        """What gradients are multiplied with, so that the norm of all of them is at most the limit."""
        norm = torch.nn.utils.get_total_norm([each.grad for each in self._parameters if each.grad is not None])
        return float(torch.clamp(limit / (norm + 1e-6), max=1.0))  # As `clip_grad_norm_` does it, to the last bit.

    def _raise(self) -> None:
        error = None if self._away is None else self._away.error
        if error is not None:
            raise ShardwiseError(
                f"an update beside the backward failed: {error}", remedy="see the error that this one follows from"
            ) from error


def _visiting_bytes(device: torch.device) -> int:
    """The device's memory for state on its way, unless somebody says otherwise."""
    if device.type != "cuda":
        return 16 * SLOT_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory * PART_OF_ALL)


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
    if not isinstance(optimizer, tuple(ELEMENTWISE)):
        names = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
        raise ShardwiseError(
            f"{type(optimizer).__name__} looks at whole matrices, and cores of the host update parameters in pieces",
            remedy=f'one of {names}; or at="device"',
        )
