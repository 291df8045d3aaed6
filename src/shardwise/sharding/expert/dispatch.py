"""Rows to the ranks of their experts, and what the experts make of them back.

    rank 0   rows by slot   a0 a1 | a2 a3 ─┐ counts, then rows ┌─ a0 b0 a1 b1 ─ experts 0, 1 ─┐ rows ┌─ back, as sent
    rank 1                  b0 b1 | b2 b3 ─┘                   └─ a2 b2 a3 b3 ─ experts 2, 3 ─┘      └─

How many rows go where is known to their sender alone, so a rank first sends each other one the counts for its experts.
No row is dropped here and none is padded: what a router has dropped does not come this far.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardwise.ranks.collectives import Group, exchange, gather, scatter, start_all_to_all
from shardwise.sharding.expert.async_all_to_all import AsyncAllToAll
from shardwise.sharding.expert.permute import inverse, permute, reorder, unpermute, untouched
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
        #: The slot of each expert; None if that is its number.
        self._slots = None if placement.is_in_order else inverse(torch.tensor(placement.order))

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
        return _joined(exchange(made, self.group, received, sent), len(rows), self.alike), beside

    def _agree(self, counts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """The counts of rows for the experts here, by sender; and rows sent to and received from every rank."""
        sizes, rank = self.placement.sizes, self.group.rank
        arrived = start_all_to_all(counts, self.group, sizes, [sizes[rank]] * self.group.size).finish()
        there = arrived.view(self.group.size, sizes[rank])
        both: list[int] = torch.cat((counts, arrived)).tolist()  # The device is waited for once.
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

        def compute(arrived: Tensor, there: Tensor) -> Tensor:
            return _sorted(experts, arrived, there)

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
    length = -(-len(rows) // alike.size)
    first, last = (min((alike.rank + more) * length, len(rows)) for more in (0, 1))
    filled = pad(rows, (0, 0, 0, alike.size * length - len(rows)))
    ends = counts.cumsum(0).clamp(first, last)
    return scatter(filled, alike, 0)[: last - first], ends.diff(prepend=ends.new_tensor([first]))


def _joined(part: Tensor, num_rows: int, alike: Group) -> Tensor:
    """All rows, where each rank has its part."""
    if alike.size == 1:
        return part
    length = -(-num_rows // alike.size)
    return gather(pad(part, (0, 0, 0, length - len(part))), alike, 0, used_alike=True)[:num_rows]


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
