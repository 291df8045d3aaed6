"""Parameters that are updated together, with their optimizer: on the host in pieces, or on the device at once.

The weights that are trained are fp32, beside the optimizer's state. The device has them in the precision that it
computes in; where that is fp32 and the state is on the device, they are one and the same.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.states.tiers.partial_step import set_rate
from shardwise.states.tiers.workers import Workers

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


class Part(NamedTuple):
    """Where a piece and one parameter meet: numbers of the parameter, and where they are in the piece."""

    parameter: int
    of_parameter: slice
    of_piece: slice


def cut(bucket: Bucket, length: int) -> Iterator[list[Part]]:
    """A bucket's numbers in pieces of so many, the last perhaps of fewer: which parts of parameters make up each."""
    for start in range(0, bucket.size, length):
        stop, parts, offset = min(start + length, bucket.size), [], 0
        for index, parameter in enumerate(bucket.parameters):
            low, high = max(start, offset), min(stop, offset + parameter.numel())
            if low < high:
                parts.append(Part(index, slice(low - offset, high - offset), slice(low - start, high - start)))
            offset += parameter.numel()
        yield parts


class _Piece(NamedTuple):
    """Numbers that one core updates. Each part is a weight of its own: it counts its own steps, and may be left out."""

    flat: Tensor
    parts: list[Part]
    masters: list[nn.Parameter]
    optimizer: Optimizer


class HostState:
    """Master weights and optimizer state of a bucket on the host, in pieces that cores update side by side."""

    def __init__(self, bucket: Bucket, make_optimizer: MakeOptimizer, workers: Workers) -> None:
        self.bucket, self._workers = bucket, workers
        master = torch.cat([each.detach().float().cpu().view(-1) for each in bucket.parameters])
        # As many pieces as make all cores end together.
        rounds = -(-bucket.size // (_PIECE * workers.count))
        self._length = -(-bucket.size // (rounds * workers.count))
        self._pieces = [
            _make_piece(flat, parts, make_optimizer)
            for flat, parts in zip(torch.split(master, self._length), cut(bucket, self._length), strict=True)
        ]

    def update(
        self,
        gradients: Tensor,
        weights: Tensor,
        has_gradient: Sequence[bool],
        scale: float | None,
        rate: float | None,
    ) -> None:
        """Update from flat gradients, and write the new weights: both of the bucket's size, in any precision.

        Parameters without a gradient are left alone, as the plain optimizer does; theirs may be any numbers.
        """
        for piece in self._pieces:
            set_rate(piece.optimizer, rate)

        def one(piece: _Piece, gradient: Tensor, weight: Tensor) -> None:
            flat = gradient.float() if scale is None else gradient.float().mul_(scale)
            for part, master in zip(piece.parts, piece.masters, strict=True):
                master.grad = flat[part.of_piece] if has_gradient[part.parameter] else None
            piece.optimizer.step()
            for master in piece.masters:
                master.grad = None
            weight.copy_(piece.flat)

        shares = zip(
            self._pieces, torch.split(gradients, self._length), torch.split(weights, self._length), strict=True
        )
        self._workers.run([partial(one, *each) for each in shares])


def _make_piece(flat: Tensor, parts: list[Part], make_optimizer: MakeOptimizer) -> _Piece:
    masters = [nn.Parameter(flat[part.of_piece]) for part in parts]
    return _Piece(flat, parts, masters, make_optimizer(masters))


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
        set_rate(self._optimizer, rate)
        pairs = list(zip(self.bucket.parameters, self._masters, strict=True))
        for (_, master), gradient in zip(pairs, self.bucket.take(), strict=True):
            if gradient is not None:
                master.grad = gradient.float() if scale is None else gradient.float().mul_(scale)
        self._optimizer.step()
        for parameter, master in pairs:
            master.grad = None
            if master is not parameter:
                parameter.data.copy_(master.detach())


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
