"""Training with optimizer state on the host: updates run beside the backward and under the next forward.

A bucket of parameters, for example one block, is ready when its last gradient has arrived. Then the device updates its
state, which was prefetched (`host_states.py`) or is on the device anyway. A block's forward waits only for its own
weights. Nothing is stale: the results are those of the optimizer without offloading.

The trained weights are fp32 and live beside the optimizer's state. The device has them in the precision that it
computes in; if that is fp32 and the state is on the device, they are the same tensors.

The host's cores update nothing: 16 of them with 91 GB/s of memory made 6,300 tokens/s of a Llama-3B, where state that
comes to an H200 made 18,062.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.cost.memory import STAGING_BYTES
from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from shardwise.states.parameter_group import number_bytes_of
from shardwise.states.tiers.choose_offloaded import choose_last
from shardwise.states.tiers.chunks import set_rate
from shardwise.states.tiers.copy_streams import CopyStreams, device_of
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.tiers.packing import Packing
from shardwise.states.tiers.residency import HandedGradient, MasterWeight
from shardwise.states.tiers.staging import PART_OF_ALL

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


class UpdateBucket:
    """Parameters of one unit."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.size = sum(each.numel() for each in self.parameters)
        self._arrived: set[nn.Parameter] = set()

    def arrive(self, parameter: nn.Parameter) -> bool:
        """Record that a gradient has arrived; return whether it was the last."""
        self._arrived.add(parameter)
        return len(self._arrived) == len(self.parameters)

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient is there that was not taken."""
        return bool(self._arrived)

    def take(self) -> list[Tensor | None]:
        """Return the gradients of the parameters, and remove them there."""
        self._arrived.clear()
        found = [each.grad for each in self.parameters]
        for each in self.parameters:
            each.grad = None
        return found


class DeviceState:
    """Master weights and optimizer state of a bucket, on the device of its parameters."""

    def __init__(self, bucket: UpdateBucket, make_optimizer: MakeOptimizer) -> None:
        self._bucket = bucket
        self._masters = [
            each if each.dtype is torch.float32 else nn.Parameter(each.detach().float()) for each in bucket.parameters
        ]
        self._optimizer = make_optimizer(self._masters)

    def update(self, scale: float | None, rate: float | None) -> None:
        """Update from the parameters' gradients, which are consumed."""
        set_rate(self._optimizer, rate)
        pairs = list(zip(self._bucket.parameters, self._masters, strict=True))
        for (_, master), gradient in zip(pairs, self._bucket.take(), strict=True):
            if gradient is not None:
                master.grad = gradient.float() if scale is None else gradient.float().mul_(scale)
        self._optimizer.step()
        for parameter, master in pairs:
            master.grad = None
            if master is not parameter:
                parameter.data.copy_(master.detach())


def residencies_of(bucket: UpdateBucket, copies: CopyStreams) -> list[HandedGradient]:
    """Return how the parameters of a bucket are updated: those of less than full precision have master weights.

    For Adam, 8 or 12 bytes per element are copied each way.
    """
    low = [each for each in bucket.parameters if each.element_size() < torch.float32.itemsize]
    packing = Packing.of(torch.empty(each.shape, dtype=torch.float32, device="meta") for each in low)
    memory = copies.pinned((packing.num_bytes,), torch.uint8) if low else torch.empty(0, dtype=torch.uint8)
    masters = dict(zip(low, packing.views(memory), strict=True))
    for parameter, master in masters.items():
        master.copy_(parameter.detach())
    return [
        MasterWeight(nn.Parameter(masters[each]), each) if each in masters else HandedGradient(each, each)
        for each in bucket.parameters
    ]


def make_update_buckets(module: nn.Module, blocks: Collection[nn.Module]) -> dict[nn.Module, UpdateBucket]:
    """Return a bucket for each block, and for each other module with parameters of its own, in order of use.

    That is assumed to be the order of registration; otherwise some wait longer than necessary. A parameter of several
    belongs to the first.
    """
    found: dict[nn.Module, UpdateBucket] = {}
    seen: set[nn.Parameter] = set()

    def add(each: nn.Module) -> None:
        is_block = each in blocks
        own = [one for one in each.parameters(recurse=is_block) if one.requires_grad and one not in seen]
        seen.update(own)
        if own:
            found[each] = UpdateBucket(own)
        if not is_block:
            for child in each.children():
                add(child)

    add(module)
    return found


class HostUpdates:
    """An optimizer for a module on a device, with its state, or most of it, on the host.

    It replaces the optimizer in a loop: `loss.backward()`, then `step()`. `blocks` are the modules whose parameters are
    updated together. `on_host` is the least share of elements whose state is on the host. The rest is on the device:
    that of the parameters that a forward uses first, as their gradients come last and are needed first. With `clip` no
    update starts before the norm of all gradients is known. `staging_bytes` of the device's memory are for state in
    transit: with more of it, less has to be copied during a backward.
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
        staging_bytes: int | None = None,
    ) -> None:
        if not 0 <= on_host <= 1:
            raise ShardwiseError(f"on_host={on_host} is not a fraction", remedy="a number from 0 for none to 1 for all")
        self._clip, self._parameters = clip, list(module.parameters())
        by_unit = make_update_buckets(module, set(blocks))
        self._buckets = list(by_unit.values())
        offloaded = choose_last({each: float(each.size) for each in self._buckets}, on_host)
        self._on_device = {each: DeviceState(each, make_optimizer) for each in self._buckets if each not in offloaded}
        self._copies = CopyStreams(device_of(place), machine, place)
        self._residencies = {
            each: residencies_of(each, self._copies) for each in self._buckets if each not in self._on_device
        }
        self._states: HostStates | None = None
        if self._residencies:
            staging = _staging_bytes(self._copies.device) if staging_bytes is None else staging_bytes
            every = [each for mine in self._residencies.values() for each in mine]
            self._states = _make_states(every, make_optimizer, self._copies, staging)
        #: The learning rate of later updates; the optimizers' own if it is None.
        self.rate: float | None = None
        self._is_last = True
        self._scale: float | None = None
        self._hooks = self._make_hooks(module, by_unit)

    @property
    def host_fraction(self) -> float:
        """The share of elements whose state is on the host."""
        total = sum(each.size for each in self._buckets)
        return 1 - sum(each.size for each in self._on_device) / total if total else 0.0

    def accumulate(self, *, is_last: bool) -> None:
        """Set before a backward whether it is the step's last: before that, gradients only accumulate."""
        self._is_last = is_last

    def step(self) -> None:
        """End a step. Updates continue in the background; a forward waits for the weights that it is about to use."""
        self._scale = None if self._clip is None else self._clipping(self._clip)
        for bucket in self._buckets:
            if bucket.has_gradients:  # All buckets if gradients are clipped; otherwise those with unused parameters.
                self._update(bucket)
        if self._states is not None:
            self._states.step()
            self._states.begin()

    def wait(self) -> None:
        """Wait until every weight on the device is new, and all state is on the host."""
        if self._states is not None:
            self._states.wait()
        self._raise()
        if self._copies.device.type != "cpu":
            torch.cuda.synchronize(self._copies.device)

    def close(self) -> None:
        """Finish, and detach from the module."""
        try:
            self.wait()
        finally:
            if self._states is not None:
                self._states.close()
            self._copies.close()
            for hook in self._hooks:
                hook.remove()

    def _make_hooks(self, module: nn.Module, by_unit: dict[nn.Module, UpdateBucket]) -> list[Any]:
        bucket_of = {parameter: each for each in self._buckets for parameter in each.parameters}
        hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))  # type: ignore[no-untyped-call]
            for parameter, bucket in bucket_of.items()
        ]
        for unit in module.modules():
            is_block = unit in by_unit and any(True for _ in unit.children())
            own = unit.parameters(recurse=is_block)
            used = {bucket_of[each]: None for each in own if each in bucket_of}
            weights = [one.weight for each in used for one in self._residencies.get(each, ())]
            if weights:
                hooks.append(unit.register_forward_pre_hook(partial(self._before, weights)))
        return hooks

    def _arrived(self, bucket: UpdateBucket, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter), "a hook of a parameter"
        if self._is_last and bucket.arrive(parameter) and self._clip is None:
            self._update(bucket)

    def _before(self, weights: list[nn.Parameter], *_: object) -> None:
        assert self._states is not None, "the state of some is on the host"
        self._states.follow(weights)
        self._raise()

    def _update(self, bucket: UpdateBucket) -> None:
        """Update a bucket that has its gradients, or request it. They are removed from its parameters."""
        on_device = self._on_device.get(bucket)
        if on_device is not None:
            on_device.update(self._scale, self.rate)
            return
        assert self._states is not None, "its state is on the host"
        self._raise()
        residencies = self._residencies[bucket]
        weights = [each.weight for each in residencies]
        self._states.settle(weights)
        for each, gradient in zip(residencies, bucket.take(), strict=True):
            each.take(gradient, self._scale)
        self._states.rate = self.rate
        self._states.ready(weights)

    def _clipping(self, limit: float) -> float:
        """Return the factor on gradients that limits their global norm."""
        norm = torch.nn.utils.get_total_norm([each.grad for each in self._parameters if each.grad is not None])
        return float(torch.clamp(limit / (norm + 1e-6), max=1.0))  # Bitwise as in `clip_grad_norm_`.

    def _raise(self) -> None:
        error = None if self._states is None else self._states.error
        if error is not None:
            raise ShardwiseError(
                f"an update beside the backward failed: {error}", remedy="see the error that this one follows from"
            ) from error


def _make_states(
    residencies: Sequence[HandedGradient], make_optimizer: MakeOptimizer, copies: CopyStreams, staging_bytes: int
) -> HostStates:
    """Return the state of an optimizer that is used here only, so that threads may step it."""
    master_bytes = max(each.weight.element_size() if isinstance(each, MasterWeight) else 0 for each in residencies)
    number_bytes = number_bytes_of(make_optimizer, [each.parameter for each in residencies]) + master_bytes
    states = HostStates(
        {make_optimizer([each.weight for each in residencies]): number_bytes},
        1.0,
        copies,
        residencies={each.weight: each for each in residencies},
        staging_bytes=staging_bytes,
        threaded=True,
    )
    states.begin()
    return states


def _staging_bytes(device: torch.device) -> int:
    """Return the default of the device's memory for state in transit."""
    if device.type != "cuda":
        return 16 * STAGING_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory * PART_OF_ALL)
