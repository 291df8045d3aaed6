"""Parameters that are updated together, with their optimizer: on the host in pieces, or on the device at once.

The weights that are trained are fp32, beside the optimizer's state. The device has them in the precision that it
computes in; where that is fp32 and the state is on the device, they are one and the same.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.runtime.offload.workers import Workers

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]

#: About as many numbers as one core updates at a time: their gradients, made fp32, stay in the processor's caches. With
#: fewer, more time goes into starting than into updating.
_PIECE = 2 * 2**20


class Bucket:
    """Parameters of one unit. Numbers go with the order of use in a forward: who is used first is updated first."""

    def __init__(self, number: int, parameters: Sequence[nn.Parameter]) -> None:
        self.number, self.parameters = number, list(parameters)
        self.size = sum(each.numel() for each in self.parameters)
        self.dtype = self.parameters[0].dtype
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

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat tensor that belong to each parameter, flat as well."""
        return list(torch.split(flat[: self.size], [each.numel() for each in self.parameters]))


class HostState:
    """Master weights and optimizer state of a bucket on the host, in pieces that cores update side by side."""

    def __init__(self, bucket: Bucket, make_optimizer: MakeOptimizer, workers: Workers) -> None:
        self.bucket, self._workers = bucket, workers
        master = torch.cat([each.detach().float().cpu().view(-1) for each in bucket.parameters])
        # As many pieces as make all cores end together.
        rounds = -(-bucket.size // (_PIECE * workers.count))
        self._length = -(-bucket.size // (rounds * workers.count))
        self._pieces = [nn.Parameter(piece) for piece in torch.split(master, self._length)]
        self._optimizers = [make_optimizer([piece]) for piece in self._pieces]

    def update(self, gradients: Tensor, weights: Tensor, scale: float | None, rate: float | None) -> None:
        """Update from flat gradients, and write the new weights: both of the bucket's size, in any precision."""
        set_rate(self._optimizers, rate)

        def one(piece: nn.Parameter, optimizer: Optimizer, gradient: Tensor, weight: Tensor) -> None:
            piece.grad = gradient.float() if scale is None else gradient.float().mul_(scale)
            optimizer.step()
            piece.grad = None
            weight.copy_(piece.detach())

        parts = zip(
            self._pieces,
            self._optimizers,
            torch.split(gradients, self._length),
            torch.split(weights, self._length),
            strict=True,
        )
        self._workers.run([partial(one, *each) for each in parts])


class DeviceState:
    """Master weights and optimizer state of a bucket where its parameters are."""

    def __init__(self, bucket: Bucket, make_optimizer: MakeOptimizer) -> None:
        self.bucket = bucket
        self._masters = [
            each if each.dtype is torch.float32 else nn.Parameter(each.detach().float()) for each in bucket.parameters
        ]
        self._optimizer = make_optimizer(self._masters)

    def update(self, scale: float | None, rate: float | None) -> None:
        """Update from the parameters' gradients, which are used up."""
        set_rate([self._optimizer], rate)
        pairs = list(zip(self.bucket.parameters, self._masters, strict=True))
        for (_, master), gradient in zip(pairs, self.bucket.take(), strict=True):
            if gradient is not None:
                master.grad = gradient.float() if scale is None else gradient.float().mul_(scale)
        self._optimizer.step()
        for parameter, master in pairs:
            master.grad = None
            if master is not parameter:
                parameter.data.copy_(master.detach())


def set_rate(optimizers: Sequence[Optimizer], rate: float | None) -> None:
    """Have optimizers use a learning rate, if one is given."""
    if rate is not None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate


def make_buckets(module: nn.Module, blocks: Collection[nn.Module]) -> dict[nn.Module, Bucket]:
    """A bucket for each block, and for each module outside of them that has parameters of its own, in order of use.

    That is taken to be the order in which they are registered: if it is not, some wait longer than they must. A
    parameter that several have belongs to the first.
    """
    found: dict[nn.Module, Bucket] = {}
    seen: set[nn.Parameter] = set()

    def visit(each: nn.Module) -> None:
        is_block = each in blocks
        own = [one for one in each.parameters(recurse=is_block) if one.requires_grad and one not in seen]
        seen.update(own)
        if own:
            found[each] = Bucket(len(found), own)
        if not is_block:
            for child in each.children():
                visit(child)

    visit(module)
    return found
