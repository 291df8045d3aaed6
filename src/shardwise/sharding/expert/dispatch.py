"""Dispatch rows to the ranks of their experts, and bring the experts' outputs back.

    rank 0   rows by slot   a0 a1 | a2 a3 ─┐ counts, then rows ┌─ a0 b0 a1 b1 ─ experts 0, 1 ─┐ rows ┌─ back, as sent
    rank 1                  b0 b1 | b2 b3 ─┘                   └─ a2 b2 a3 b3 ─ experts 2, 3 ─┘      └─

Only the sender knows how many rows go where, so a rank first sends every other rank the counts for its experts. No row
is dropped or padded here: tokens dropped by a router do not reach this code. Rows are ordered by `permute` and
`reorder`, whose backwards are permutations too, so gradients are never added in a nondeterministic order.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import (
    Group,
    Pending,
    exchange,
    filled,
    gather,
    read,
    scatter,
    span_of,
    start_all_to_all,
)
from shardwise.sharding.expert.placement import Placement

StageStates = TypeVar("StageStates")
#: Applies this rank's experts to rows. The second argument is [ranks, local experts]: rows per sender and expert.
Compute = Callable[[Tensor, Tensor], Tensor]
#: Maps tokens, the chosen experts of each and their weights to the experts' output.
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Dispatch:
    """The dispatch of one layer on one rank. `load` counts the rows of each of this rank's experts in training.

    `alike` are the ranks of the group with the same tokens (tensor parallel ranks); each of them sends a part.
    """

    def __init__(
        self, group: Group, placement: Placement, alike: Group | None = None, *, name: str = "", skips: bool = True
    ) -> None:
        self.group, self.alike = group, alike or Group()
        #: The layer, and whether a choice of no expert (-1, or their number) adds nothing.
        self.name, self.skips = name, skips
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """Set the placement of experts, and reset the load."""
        self.placement = placement
        self.load = [0] * placement.sizes[self.group.rank]
        order = placement.order
        #: The slot of each expert; None if every slot equals its expert's index.
        self._slots = None if order == tuple(range(len(order))) else inverse(torch.tensor(order))

    def take_load(self) -> Tensor:
        """Return the rows that each expert has had in training on this rank (0 for others'), and reset the counts."""
        whole = torch.zeros(len(self.placement.order), dtype=torch.int64)
        whole[list(self.placement.ranks[self.group.rank])] = torch.tensor(self.load)
        self.load = [0] * len(self.load)
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> "Dispatch":
        return self  # A copy of a module exchanges with the same ranks.

    def run(
        self, rows: Tensor, counts: Tensor, experts: nn.Module, compute: Compute, meanwhile: Callable[[], StageStates]
    ) -> tuple[Tensor, StageStates]:
        """Dispatch rows sorted by slot, `counts[slot]` of each. Return the experts' output and `meanwhile`'s result."""
        if torch.is_autocast_enabled(rows.device.type):
            # Autocast would round the rows in the experts anyway, so round them before they are sent.
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        # Ranks with the same tokens each send a part of them, so that no row is sent twice.
        part, counts = _part(rows, counts, self.alike)
        there, sent, received = self._agree(counts)
        transfer = AsyncAllToAll(self._with_experts(part, sum(sent)), self.group, sent, received)
        beside = meanwhile()
        arrived = transfer.wait()
        made = compute(arrived, there).to(arrived.dtype) if len(arrived) else untouched(arrived, experts.parameters())
        back = exchange(made, self.group, received, sent)
        return gather(filled(back, 0, len(part)), self.alike, 0, used_alike=True, length=len(rows)), beside

    def _with_experts(self, rows: Tensor, number: int) -> Tensor:
        """Leave out the rows at the end that have no expert."""
        if number < len(rows) and not self.skips:
            raise ShardwiseError(
                f"{self.name} was given {len(rows) - number} choices that are none of its {len(self.placement.order)}"
                " experts, and its forward makes something of them",
                remedy="a weight of 0 for choices that are dropped, or ep=1",
            )
        return rows if number == len(rows) else rows[:number]

    def _agree(self, counts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Return rows per sender and local expert, and the numbers of rows sent to and received from every rank."""
        sizes, rank = self.placement.sizes, self.group.rank
        arrived = start_all_to_all(counts, self.group, sizes, [sizes[rank]] * self.group.size).finish()
        there = arrived.view(self.group.size, sizes[rank])
        both: list[int] = read(torch.cat((counts, arrived)), self.group)  # One device synchronisation.
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
        """Dispatch for experts that take rows sorted by expert, with counts: the `exchange` of our own transformer."""
        if rows.is_meta:
            # On the meta device the number of arriving rows is unknown. On average it is the number sent.
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
        """Dispatch for experts that take tokens, the chosen experts and their weights, both [tokens, chosen].

        Weights are not sent: experts are given ones, and their output is weighted when it is back. A choice of no
        expert adds nothing.
        """
        num_experts, flat = len(self.placement.order), chosen.flatten().long()
        is_one = (flat >= 0) & (flat < num_experts)
        # Choices of no expert come last, and are not sent.
        slots = torch.where(is_one, self._slots_of(flat.clamp(0, num_experts - 1)), num_experts)
        order = slots.argsort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=slots.device)
        counts = counts.scatter_add_(0, slots, torch.ones_like(slots))[:-1]

        def compute(rows: Tensor, there: Tensor) -> Tensor:
            return call(rows, _expert_of_rows(there, len(rows))[:, None], rows.new_ones(len(rows), 1))

        made, beside = self.run(permute(tokens, order, chosen.shape[1]), counts, experts, compute, meanwhile)
        return unpermute(made, order, weights).to(tokens.dtype), beside

    def _slots_of(self, experts: Tensor) -> Tensor:
        return experts if self._slots is None else self._slots.to(experts.device)[experts]


def _part(rows: Tensor, counts: Tensor, alike: Group) -> tuple[Tensor, Tensor]:
    """Return this rank's part of rows that all `alike` ranks hold, and its count of rows for each slot."""
    if alike.size == 1:
        return rows, counts
    first, last = span_of(len(rows), alike)
    ends = counts.cumsum(0).clamp(first, last)
    return scatter(rows, alike, 0), ends.diff(prepend=ends.new_tensor([first]))


def _expert_of_rows(there: Tensor, num_rows: int) -> Tensor:
    """Return the local index of each row's expert, in order of arrival."""
    num_ranks, num_experts = there.shape
    experts = torch.arange(num_experts, device=there.device).repeat(num_ranks)
    return experts.repeat_interleave(there.flatten(), output_size=num_rows)


def _sorted(experts: nn.Module, rows: Tensor, there: Tensor) -> Tensor:
    """Apply experts that take rows sorted by expert to rows that are sorted by sender; restore the order."""
    counts = there.sum(0)
    if 1 in there.shape:
        made: Tensor = experts(rows, counts)
        return made
    order = _expert_of_rows(there, len(rows)).argsort(stable=True)
    return reorder(experts(reorder(rows, order), counts), inverse(order))


class AsyncAllToAll:
    """An all-to-all of rows that overlaps with other computation. The constructor starts it.

        forward     start ─ meanwhile ─ wait          the rows travel from `start` to `wait`,
        backward    start ─ meanwhile ─ wait          and their gradients from `wait` to `start`

    Autograd runs ready nodes in the reverse order of the forward, so the backward of the computation in between
    overlaps the transfer too. In the graph an empty tensor links `wait` to `start`.
    """

    def __init__(self, rows: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        self.group, self.sent, self.received = group, sent, received
        self.out: Pending | None = None
        self.back: Pending | None = None
        self._link: Tensor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Wait for the rows that arrive, and return them."""
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
    """Return the inverse permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def reorder(rows: Tensor, order: Tensor) -> Tensor:
    """Put row `order[i]` at place i. `order` is a permutation."""
    return _Reorder.apply(rows, order, inverse(order))  # type: ignore[no-untyped-call, no-any-return]


def permute(tokens: Tensor, order: Tensor, num_chosen: int) -> Tensor:
    """Expand [tokens, width] to one row for each choice, with choice `order[i]` at place i."""
    return _Permute.apply(tokens, order, inverse(order), num_chosen)  # type: ignore[no-untyped-call, no-any-return]


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return rows of choices to their tokens: the sum over each token's choices, weighted with [tokens, chosen]."""
    choices = reorder(rows, inverse(order)).view(*weights.shape, rows.shape[-1])
    return (choices * weights[..., None]).sum(1)


def untouched(rows: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Return the empty rows of experts that received none.

    They stay in the autograd graph, because other ranks wait for this rank's part in the backward. Gradients are zeros,
    not absent: an optimizer that has a gradient may decay the weight.
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
    """The backward restores the order of choices and sums over those of a token."""

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
