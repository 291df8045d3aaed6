"""The collectives of a group of ranks, each with its backward, and with its traffic counted.

      forward                            backward
    copy             nothing           all_reduce     the input of a sharded layer: every rank adds to its gradient
    sum              all_reduce        nothing        the output of one: every rank has a part of each number
    gather           all_gather        reduce_scatter, or a slice where all ranks use the whole alike
    scatter          a slice           all_gather
    exchange         all_to_all        all_to_all, the other way

Every collective can be started and finished separately (`start_*`), with computation in between. On the meta device
nothing moves, but shapes are right. Traffic is counted as that of a ring algorithm.

If the ranks do not divide a dim, all pieces have the length of the first, except those at the end (`span_of`). For the
transfer they are padded with zeros to one length; the zeros are removed again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.torch_private import find_gpu_backend

# torch 2.13 has new names for these.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(slots=True)
class Traffic:
    """The traffic of this rank in a group: the number of collectives of each kind, and the bytes sent."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    #: Called when a collective is about to be launched, with its kind.
    heard: Callable[[str], None] | None = field(default=None, compare=False, repr=False)

    def note(self, kind: str, num_bytes: int) -> None:
        if self.heard is not None:
            self.heard(kind)
        self.calls[kind] += 1
        self.bytes[kind] += num_bytes

    def copy(self) -> "Traffic":
        return Traffic(self.calls.copy(), self.bytes.copy())

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()


class Group:
    """A group of ranks. A single rank needs no process group, and sends nothing."""

    def __init__(self, handle: dist.ProcessGroup | None = None) -> None:
        self.handle = handle
        self.size = 1 if handle is None else handle.size()
        self.rank = 0 if handle is None else handle.rank()
        self.traffic = Traffic()
        #: Called after a wait for a collective of this group, with its kind and when it began and ended.
        self.note: Callable[[str, float, float], None] | None = None
        #: Called before the host waits for what the group has computed on a device.
        self.before_read: Callable[[], None] | None = None
        #: A context around each wait of the host for the other ranks of this group.
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        return self  # A copy of a module communicates with the same ranks.

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def all_reduce(self, whole: Tensor, op: Any) -> dist.Work | None:
        """Start to replace a tensor by its sum (or `op`) over the ranks. None: it is done already."""
        work: dist.Work | None = dist.all_reduce(whole, op, group=self.handle, async_op=True)
        return work

    def all_gather(self, stacked: Tensor, piece: Tensor) -> dist.Work | None:
        """Start to fill a flat tensor with the flat pieces of all ranks."""
        work: dist.Work | None = all_gather_single(stacked, piece, group=self.handle, async_op=True)
        return work

    def reduce_scatter(self, piece: Tensor, stacked: Tensor) -> dist.Work | None:
        """Start to sum flat tensors over the ranks into this rank's piece."""
        work: dist.Work | None = reduce_scatter_single(piece, stacked, group=self.handle, async_op=True)
        return work

    def all_to_all(
        self, arrived: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> dist.Work | None:
        """Start to exchange rows."""
        how: dict[str, Any] = {"group": self.handle, "async_op": True}
        work: dist.Work | None = dist.all_to_all_single(arrived, rows, list(received), list(sent), **how)
        return work


class Pending:
    """A collective in flight. `finish` waits for it and returns the result."""

    __slots__ = ("_group", "_kind", "_result", "_work")

    def __init__(self, work: dist.Work | None, result: Callable[[], Tensor], group: Group, kind: str = "") -> None:
        self._work, self._result, self._group, self._kind = work, result, group, kind

    def finish(self) -> Tensor:
        if self._work is not None:
            wait_for(self._work, self._group, self._kind)
        return self._result()


def wait_for(work: dist.Work, group: Group, kind: str) -> None:
    """Wait for work of a group, and note the wait if it is recorded."""
    start = perf_counter()
    with group.waiting():
        work.wait()
    if group.note is not None:
        group.note(kind, start, perf_counter())


def goes_over_host(device: torch.device, group: Group) -> bool:
    """Whether point-to-point messages must be in host memory: gloo cannot send from a GPU, and aborts a process that
    tries (SIGABRT)."""
    return device.type == "cuda" and group.handle is not None and find_gpu_backend(group.handle) is None


def read(numbers: Tensor, group: Group) -> list[Any]:
    """Read the result of a collective. `before_read` first reports to this rank's watch that it waits for it."""
    if group.before_read is not None:
        group.before_read()
    found: list[Any] = numbers.tolist()
    return found


def start_all_reduce(tensor: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Pending:
    """Sum over the ranks, in place if the tensor is contiguous."""
    whole = tensor.contiguous()
    if group.size == 1 or whole.is_meta:
        return Pending(None, lambda: whole, group)
    group.traffic.note("all_reduce", 2 * others_bytes(whole, group))
    return Pending(group.all_reduce(whole, op), lambda: whole, group, "all_reduce")


def start_all_gather(tensor: Tensor, group: Group, dim: int = 0, *, length: int | None = None) -> Pending:
    """Concatenate every rank's piece along a dim. Pieces have equal sizes, or are those of a whole of `length`."""
    if group.size == 1:
        return Pending(None, lambda: tensor, group)
    piece = (tensor if length is None else filled(tensor, dim, longest_piece(length, group.size))).contiguous()
    stacked = piece.new_empty((group.size, *piece.shape))
    work = None
    if not piece.is_meta:
        group.traffic.note("all_gather", others_bytes(stacked, group))
        work = group.all_gather(stacked.view(-1), piece.view(-1))
    return Pending(work, lambda: _joined(stacked, dim, length), group, "all_gather")


def start_reduce_scatter(tensor: Tensor, group: Group, dim: int = 0) -> Pending:
    """Sum over the ranks; each keeps its piece along a dim."""
    if group.size == 1:
        return Pending(None, lambda: tensor, group)
    start, stop = span_of(tensor.shape[dim], group)
    stacked = _cut(tensor, group.size, dim)
    piece = torch.empty_like(stacked[0])
    work = None
    if not piece.is_meta:
        group.traffic.note("reduce_scatter", others_bytes(stacked, group))
        work = group.reduce_scatter(piece.view(-1), stacked.view(-1))
    return Pending(work, lambda: piece.narrow(dim, 0, stop - start).contiguous(), group, "reduce_scatter")


def start_all_to_all(tensor: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Pending:
    """Exchange rows with every rank. Rows are in the order of ranks."""
    if group.size == 1:
        return Pending(None, lambda: tensor, group)
    rows = tensor.contiguous()
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    work = None
    if not rows.is_meta:
        row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else 0
        group.traffic.note("all_to_all", (sum(sent) - sent[group.rank]) * row_bytes)
        work = group.all_to_all(arrived, rows, received, sent)
    return Pending(work, lambda: arrived, group, "all_to_all")


def copy(tensor: Tensor, group: Group) -> Tensor:
    """Return the tensor itself; its gradient is summed over the ranks."""
    # Autograd may pass one gradient to several nodes, so it must not be written to.
    return _apply(tensor, group, lambda t: t.view_as(t), lambda gradient: start_all_reduce(gradient.clone(), group))


def sum_over(tensor: Tensor, group: Group, *, in_place: bool = False) -> Tensor:
    """Return the sum over the ranks. Its gradient is the same on all. `in_place`: the tensor has no other users."""
    return _apply(
        tensor,
        group,
        lambda t: start_all_reduce(t.detach() if in_place else t.clone(), group),
        lambda gradient: gradient,
    )


def gather(tensor: Tensor, group: Group, dim: int, *, used_alike: bool, length: int | None = None) -> Tensor:
    """Gather every rank's piece along a dim. `used_alike`: all ranks compute the same from it; gradients are not
    summed.

    `length` is that of the whole, where the ranks may not divide it.
    """

    def back(gradient: Tensor) -> Tensor | Pending:
        if used_alike:
            return piece_of(gradient, group, dim).contiguous()
        return start_reduce_scatter(gradient, group, dim)

    return _apply(tensor, group, lambda t: start_all_gather(t, group, dim, length=length), back)


def scatter(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's piece, along a dim, of a tensor that is the same on all ranks."""
    length = tensor.shape[dim]
    return _apply(
        tensor,
        group,
        lambda t: piece_of(t, group, dim).contiguous(),
        lambda gradient: start_all_gather(gradient, group, dim, length=length),
    )


def exchange(tensor: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Exchange rows with every rank, with a backward."""
    return _apply(
        tensor,
        group,
        lambda t: start_all_to_all(t, group, sent, received),
        lambda gradient: start_all_to_all(gradient, group, received, sent),
    )


_Step = Callable[[Tensor], Tensor | Pending]


def _apply(tensor: Tensor, group: Group, run: _Step, back: _Step) -> Tensor:
    return tensor if group.size == 1 else _Collective.apply(tensor, run, back)  # type: ignore[no-untyped-call]


class _Collective(torch.autograd.Function):
    """Apply a function to a tensor, and another to the gradient of its result. Neither saves a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: _Step, back: _Step) -> Tensor:
        ctx.back = back
        return _finished(run(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _finished(ctx.back(gradient)), None, None


def _finished(result: Tensor | Pending) -> Tensor:
    return result.finish() if isinstance(result, Pending) else result


def longest_piece(length: int, num_ranks: int) -> int:
    """Return the length of the first piece, which is the longest."""
    return -(-length // num_ranks)


def span_of(length: int, group: Group) -> tuple[int, int]:
    """Return the start and stop of this rank's piece: all are as long as the first, except those at the end."""
    size = longest_piece(length, group.size)
    return min(group.rank * size, length), min((group.rank + 1) * size, length)


def piece_of(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's piece of a tensor along a dim."""
    start, stop = span_of(tensor.shape[dim], group)
    return tensor.narrow(dim, start, stop - start)


def filled(tensor: Tensor, dim: int, length: int, value: float = 0) -> Tensor:
    """Pad a tensor at the end of a dim, up to a length."""
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_full(shape, value)), dim)


def others_bytes(whole: Tensor, group: Group) -> int:
    """Return the bytes of all pieces except one: what a rank sends so that all have the whole, in a ring or not."""
    return whole.numel() * whole.element_size() * (group.size - 1) // group.size


def _joined(stacked: Tensor, dim: int, length: int | None) -> Tensor:
    """Join contiguous pieces along a dim, without their padding."""
    num_ranks, dim = stacked.shape[0], dim % (stacked.dim() - 1)
    size = stacked.shape[dim + 1]
    if length is not None and length != num_ranks * size:
        lengths = (max(0, min(size, length - rank * size)) for rank in range(num_ranks))
        return torch.cat([piece.narrow(dim, 0, each) for piece, each in zip(stacked, lengths, strict=True)], dim)
    return stacked.flatten(0, 1) if dim == 0 else stacked.movedim(0, dim).flatten(dim, dim + 1)


def _cut(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Return the pieces of a tensor along a dim, contiguous and padded to one length."""
    dim %= tensor.dim()
    size = longest_piece(tensor.shape[dim], count)
    pieces = (*tensor.shape[:dim], count, size, *tensor.shape[dim + 1 :])
    return filled(tensor, dim, count * size).reshape(pieces).movedim(dim, 0).contiguous()
