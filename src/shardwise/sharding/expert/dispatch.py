"""Rows to the ranks of their experts, and what the experts make of them back.

    rank 0   rows by slot   a0 a1 | a2 a3 ─┐ counts, then rows ┌─ a0 b0 a1 b1 ─ experts 0, 1 ─┐ rows ┌─ back, as sent
    rank 1                  b0 b1 | b2 b3 ─┘                   └─ a2 b2 a3 b3 ─ experts 2, 3 ─┘      └─

How many rows go where is known to their sender alone, so a rank first sends each other one the counts for its experts.
No row is dropped here and none is padded: what a router has dropped does not come this far. Rows are put in order by
`permute` and `reorder`, whose backwards are permutations too: no two rows are added by a race.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwise.ranks.collectives import Group, Pending, exchange, gather, read, scatter, span_of, start_all_to_all
from shardwise.sharding.expert.placement import Placement

StageStates = TypeVar("StageStates")
#: What this rank's experts make of rows, given with [ranks, experts here]: how many rows of each came from each rank.
Compute = Callable[[Tensor, Tensor], Tensor]
#: From tokens, the experts of each and their weights, what the experts make of them.
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Dispatch:
    """The exchange of one layer, on one rank. `load` is how many rows each expert of this rank has had in training.

    `alike` are the ranks of the group that have the same tokens (tensor parallel ones), each of which sends a part.
    """

    def __init__(self, group: Group, placement: Placement, alike: Group | None = None) -> None:
        self.group, self.alike = group, alike or Group()
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """From now on experts lie like this."""
        self.placement = placement
        self.load = [0] * placement.sizes[self.group.rank]
        order = placement.order
        #: The slot of each expert; None if that is its number.
        self._slots = None if order == tuple(range(len(order))) else inverse(torch.tensor(order))

    def take_load(self) -> Tensor:
        """How many rows each of all experts has had in training on this rank. The numbers begin at 0 again."""
        whole = torch.zeros(len(self.placement.order), dtype=torch.int64)
        whole[list(self.placement.ranks[self.group.rank])] = torch.tensor(self.load)
        self.load = [0] * len(self.load)
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> "Dispatch":
        return self  # A copy of a module exchanges with the same ranks.

    def run(
        self, rows: Tensor, counts: Tensor, experts: nn.Module, compute: Compute, meanwhile: Callable[[], StageStates]
    ) -> tuple[Tensor, StageStates]:
        """Rows that lie by slot, `counts[slot]` of each: what experts make of them, and what was computed meanwhile."""
        if torch.is_autocast_enabled(rows.device.type):
            # Experts would round them: so do we, before they travel.
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        # Ranks with the same tokens each send a part of them, so that no row travels twice.
        part, counts = _part(rows, counts, self.alike)
        there, sent, received = self._agree(counts)
        transfer = AsyncAllToAll(part, self.group, sent, received)
        beside = meanwhile()
        arrived = transfer.wait()
        made = compute(arrived, there).to(arrived.dtype) if len(arrived) else untouched(arrived, experts.parameters())
        back = exchange(made, self.group, received, sent)
        return gather(back, self.alike, 0, used_alike=True, length=len(rows)), beside

    def _agree(self, counts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """The counts of rows for the experts here, by sender; and rows sent to and received from every rank."""
        sizes, rank = self.placement.sizes, self.group.rank
        arrived = start_all_to_all(counts, self.group, sizes, [sizes[rank]] * self.group.size).finish()
        there = arrived.view(self.group.size, sizes[rank])
        both: list[int] = read(torch.cat((counts, arrived)), self.group)  # The device is waited for once.
        mine, theirs = both[: len(counts)], both[len(counts) :]
        if torch.is_grad_enabled():
            self.load = [had + sum(theirs[slot :: sizes[rank]]) for slot, had in enumerate(self.load)]
        starts = [sum(sizes[:each]) for each in range(self.group.size)]
        sent = [sum(mine[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        received = [sum(theirs[at : at + sizes[rank]]) for at in range(0, len(theirs), sizes[rank])]
        return there, sent, received

    def exchange_sorted(
        self, experts: nn.Module, rows: Tensor, counts: Tensor, meanwhile: Callable[[], StageStates]
    ) -> tuple[Tensor, StageStates]:
        """For experts that take rows sorted by expert, with counts: the seam of our own transformer."""
        if rows.is_meta:
            # Without numbers nobody knows how many arrive: as many as leave, on average.
            return experts(rows, counts[: self.placement.sizes[self.group.rank]]), meanwhile()

        compute = partial(_sorted, experts)
        if self._slots is None:
            return self.run(rows, counts, experts, compute, meanwhile)
        slots = self._slots_of(torch.arange(len(counts), device=counts.device))
        order = slots.repeat_interleave(counts, output_size=len(rows)).argsort(stable=True)
        made, beside = self.run(reorder(rows, order), counts[inverse(slots)], experts, compute, meanwhile)
        return reorder(made, inverse(order)), beside

    def exchange_chosen(
        self, experts: nn.Module, call: Call, tokens: Tensor, chosen: Tensor, weights: Tensor,
        meanwhile: Callable[[], StageStates],
    ) -> tuple[Tensor, StageStates]:  # fmt: skip
        """For experts that take tokens with the experts chosen and their weights, both [tokens, chosen].

        Weights stay here: experts are given ones, and what they make is weighted when it is back.
        """
        slots = self._slots_of(chosen.flatten())
        order = slots.argsort(stable=True)
        counts = torch.zeros(sum(self.placement.sizes), dtype=torch.int64, device=slots.device)
        counts.scatter_add_(0, slots, torch.ones_like(slots))

        def compute(rows: Tensor, there: Tensor) -> Tensor:
            return call(rows, _expert_of_rows(there, len(rows))[:, None], rows.new_ones(len(rows), 1))

        made, beside = self.run(permute(tokens, order, chosen.shape[1]), counts, experts, compute, meanwhile)
        return unpermute(made, order, weights).to(tokens.dtype), beside

    def _slots_of(self, experts: Tensor) -> Tensor:
        return experts if self._slots is None else self._slots.to(experts.device)[experts]


def _part(rows: Tensor, counts: Tensor, alike: Group) -> tuple[Tensor, Tensor]:
    """This rank's part of rows that several have, and how many of each slot are in it."""
    if alike.size == 1:
        return rows, counts
    first, last = span_of(len(rows), alike)
    ends = counts.cumsum(0).clamp(first, last)
    return scatter(rows, alike, 0), ends.diff(prepend=ends.new_tensor([first]))


def _expert_of_rows(there: Tensor, num_rows: int) -> Tensor:
    """The expert, counted from this rank's first, of each row in the order in which they arrive."""
    num_ranks, num_experts = there.shape
    experts = torch.arange(num_experts, device=there.device).repeat(num_ranks)
    return experts.repeat_interleave(there.flatten(), output_size=num_rows)


def _sorted(experts: nn.Module, rows: Tensor, there: Tensor) -> Tensor:
    """What experts make of rows that are sorted by sender, for experts that want them sorted by expert."""
    counts = there.sum(0)
    if 1 in there.shape:
        made: Tensor = experts(rows, counts)
        return made
    order = _expert_of_rows(there, len(rows)).argsort(stable=True)
    return reorder(experts(reorder(rows, order), counts), inverse(order))


class AsyncAllToAll:
    """Rows for every rank against rows from every rank, while something else is computed. It begins when it is made.

        forward     start ─ meanwhile ─ wait          the rows travel from `start` to `wait`,
        backward    start ─ meanwhile ─ wait          and their gradients from `wait` to `start`

    Autograd goes back through what is ready in the reverse order of the forward, so what was computed meanwhile goes
    back meanwhile. What ties `wait` to `start` in its graph is a tensor without numbers.
    """

    def __init__(self, rows: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        self.group, self.sent, self.received = group, sent, received
        self.out: Pending | None = None
        self.back: Pending | None = None
        self._link: Tensor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """The rows that have arrived."""
        return _Wait.apply(self._link, self)  # type: ignore[no-untyped-call, no-any-return]


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.out = start_all_to_all(rows, transfer.group, transfer.sent, transfer.received)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor, None]:
        del link
        pending, ctx.transfer.back = ctx.transfer.back, None
        assert pending is not None, "gradients are sent back before they are waited for"
        return pending.finish(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, transfer: AsyncAllToAll) -> Tensor:
        del link
        ctx.transfer = transfer
        pending, transfer.out = transfer.out, None
        assert pending is not None, "rows are waited for once"
        return pending.finish()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        transfer = ctx.transfer
        transfer.back = start_all_to_all(gradient, transfer.group, transfer.received, transfer.sent)
        return gradient.new_empty(0), None


def inverse(order: Tensor) -> Tensor:
    """Where each row went."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def reorder(rows: Tensor, order: Tensor) -> Tensor:
    """Row `order[i]` at place i, where `order` has every row once."""
    return _Reorder.apply(rows, order, inverse(order))  # type: ignore[no-untyped-call, no-any-return]


def permute(tokens: Tensor, order: Tensor, num_chosen: int) -> Tensor:
    """[tokens, width] to one row for each choice: choice `order[i]` at place i."""
    return _Permute.apply(tokens, order, inverse(order), num_chosen)  # type: ignore[no-untyped-call, no-any-return]


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Rows of choices, back at their tokens: the sum over each one's choices, weighted with [tokens, chosen]."""
    choices = reorder(rows, inverse(order)).view(*weights.shape, rows.shape[-1])
    return (choices * weights[..., None]).sum(1)


def untouched(rows: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """No rows, from experts that had nothing to do.

    The graph goes on through them all the same: other ranks wait for this one's part in the backward. And gradients are
    zeros, not absent: an optimizer that has a gradient may decay the weight.
    """
    return _Untouched.apply(rows, *parameters)  # type: ignore[no-untyped-call, no-any-return]


class _Reorder(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None


class _Permute(Function):
    """Backward: in the order of the choices again, summed over a token's."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, back: Tensor, num_chosen: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.num_chosen = num_chosen
        return tokens.index_select(0, order // num_chosen)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        by_token = gradient.index_select(0, back).view(-1, ctx.num_chosen, gradient.shape[-1])
        return by_token.sum(1), None, None, None


class _Untouched(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        zeros = [torch.zeros_like(p) if want else None for p, want in zip(ctx.saved_tensors, wanted, strict=True)]
        return gradient, *zeros
