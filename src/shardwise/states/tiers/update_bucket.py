"""Parameters that are updated together, with their optimizer, in a loop of the user's own.

The weights that are trained are fp32, beside the optimizer's state. The device has them in the precision that it
computes in; where that is fp32 and the state is on the device, they are one and the same.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.packing import Packing
from shardwise.states.tiers.partial_step import set_rate
from shardwise.states.tiers.residency import HandedGradient, MasterWeight

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


class UpdateBucket:
    """Parameters of one unit."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.size = sum(each.numel() for each in self.parameters)
        self._arrived: set[nn.Parameter] = set()

    def arrive(self, parameter: nn.Parameter) -> bool:
        """A gradient is there; return whether it was the last."""
        self._arrived.add(parameter)
        return len(self._arrived) == len(self.parameters)

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient is there that was not taken."""
        return bool(self._arrived)

    def take(self) -> list[Tensor | None]:
        """The gradients of the parameters, which are theirs no more."""
        self._arrived.clear()
        found = [each.grad for each in self.parameters]
        for each in self.parameters:
            each.grad = None
        return found


class DeviceState:
    """Master weights and optimizer state of a bucket where its parameters are."""

    def __init__(self, bucket: UpdateBucket, make_optimizer: MakeOptimizer) -> None:
        self._bucket = bucket
        self._masters = [
            each if each.dtype is torch.float32 else nn.Parameter(each.detach().float()) for each in bucket.parameters
        ]
        self._optimizer = make_optimizer(self._masters)

    def update(self, scale: float | None, rate: float | None) -> None:
        """Update from the parameters' gradients, which are used up."""
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
    """How the parameters of a bucket come to be updated: those of less than full precision have master weights.

    For Adam that is 8 or 12 bytes a number each way.
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
    """A bucket for each block, and for each module outside of them that has parameters of its own, in order of use.

    That is taken to be the order in which they are registered: if it is not, some wait longer than they must. A
    parameter that several have belongs to the first.
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
