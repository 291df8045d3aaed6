"""Schedules made by repeating a building block: the controllable-memory family on a V placement (arXiv 2405.15362).

A block gives, for each rank, the slots of the four dependent computations of microbatch 0: forward on the way down,
forward on the way up, input gradient of the upper chunk, input gradient of the lower chunk. Microbatch n has the same
slots, 6 n later; the two free slots in six take weight gradients. The distances between the four determine how long
activations are held, so the block alone determines the memory.

Repeating it leaves holes during warm-up and cool-down. `_squeeze` moves computations into earlier holes, as long as no
rank exceeds the peak memory of the fullest rank.
"""

from bisect import insort
from collections.abc import Sequence
from functools import cache
from itertools import chain

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.placement import vee
from shardwise.schedule.schedule import Schedule

#: The slots of microbatch 0, for each rank four.
Block = Sequence[Sequence[int]]

#: One rank's slots: `slots[part][microbatch]`. Part 4, where there is one, are the weight gradients, counted in order.
Slots = list[list[int]]

_DOWN, _UP, _UP_GRADIENT, _DOWN_GRADIENT, _WEIGHTS = range(5)
_FREE = -1
_INTERVAL = 6


@cache
def spaced_block(num_ranks: int, steps: tuple[int, int, int, int]) -> Block:
    """Return the block whose four parts advance from rank to rank by `steps` slots, or to the next free slot."""
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    slot = -steps[_DOWN]
    for part, step in enumerate(steps):
        ranks = range(num_ranks) if part in (_DOWN, _UP_GRADIENT) else reversed(range(num_ranks))
        for position, rank in enumerate(ranks):
            # Turning round inside a rank costs one slot. Microbatches follow each other every six slots, so two parts
            # of one rank must not lie a multiple of six apart.
            slot += step if position or part == _DOWN else 1
            while any((slot - other) % _INTERVAL == 0 for other in slots[rank]):
                slot += 1
            slots[rank].append(slot)
    return slots


def repeat_block(name: str, num_microbatches: int, block: Block) -> Schedule:
    """Return the schedule that a building block makes, squeezed."""
    ranks = [
        [[offset + _INTERVAL * microbatch for microbatch in range(num_microbatches)] for offset in offsets]
        for offsets in block
    ]
    # First squeeze warm-up and cool-down with the weight gradients in place. Then squeeze the cool-down without them:
    # there they give way to everything else and take the slots that are left.
    ranks = _play(_squeeze([_with_weights(slots) for slots in ranks]))
    ranks = _squeeze([slots[:_WEIGHTS] for slots in ranks])
    ranks = _play([_with_weights(slots) for slots in ranks])
    placement = vee(len(block))
    orders = [_order(slots, placement.stages[rank]) for rank, slots in enumerate(ranks)]
    return Schedule.of(name, placement, num_microbatches, orders)


def _with_weights(slots: Slots) -> Slots:
    """Put each weight gradient that is due into the next free slot."""
    part_at = _parts_by_slot(slots[:_WEIGHTS])
    num_due, weights = 0, []
    for slot, part in enumerate(part_at):
        if part >= _UP_GRADIENT:
            num_due += 1
        elif part == _FREE and num_due:
            weights.append(slot)
            num_due -= 1
    return [*slots[:_WEIGHTS], weights + [len(part_at) + due for due in range(num_due)]]


def _parts_by_slot(slots: Slots) -> list[int]:
    """Return the part in each slot, up to the last that is not free."""
    part_at = [_FREE] * (1 + max(row[-1] for row in slots if row))
    for part, row in enumerate(slots):
        for slot in row:
            part_at[slot] = part
    return part_at


def _in_order(ranks: list[Slots]) -> list[tuple[int, int, int, int]]:
    """Return everything as (slot, rank, part, microbatch), by slot."""
    in_slot: list[list[tuple[int, int, int, int]]] = [[] for _ in range(1 + max(row[-1] for row in chain(*ranks)))]
    for rank, slots in enumerate(ranks):
        for part, row in enumerate(slots):
            for microbatch, slot in enumerate(row):
                in_slot[slot].append((slot, rank, part, microbatch))
    return list(chain(*in_slot))


def _last_need(ranks: list[Slots], rank: int, part: int, microbatch: int) -> int:
    """Return the latest slot it depends on: that of the neighbour, of the previous part, of the previous microbatch."""
    slots = ranks[rank]
    need = slots[part][microbatch - 1] if microbatch else -1
    if part == _WEIGHTS:
        return need
    # Down with the first part, up with the second, and so on.
    neighbour = rank + 1 if part & 1 else rank - 1
    beside = ranks[neighbour][part][microbatch] if 0 <= neighbour < len(ranks) else -1
    before = slots[part - 1][microbatch] if part else -1
    return max(need, beside, before)


def _squeeze(ranks: list[Slots]) -> list[Slots]:
    """Move computations of warm-up and cool-down to earlier free slots; the steady state stays.

    Without weight gradients in place, only the cool-down moves.
    """
    with_weights = len(ranks[0]) > _WEIGHTS
    ranks = [[list(row) for row in slots] for slots in ranks]
    memories = [_SlotMemory(slots) for slots in ranks]
    limit = max(memory.peak for memory in memories)
    last = len(ranks[0][_DOWN]) - 1
    gradients: list[list[int]] = [[] for _ in ranks]  # Where the input gradients of each rank have come to lie.
    filling, emptying = True, False
    for slot, rank, part, microbatch in _in_order(ranks):
        filling = filling and not (part == _DOWN_GRADIENT and rank == 0)
        if emptying or (filling and with_weights):
            need = _last_need(ranks, rank, part, microbatch)
            if part == _WEIGHTS:
                need = max(need, gradients[rank][microbatch])
            ranks[rank][part][microbatch] = memories[rank].move_forward(slot, need + 1, limit)
        if part in (_UP_GRADIENT, _DOWN_GRADIENT):
            insort(gradients[rank], ranks[rank][part][microbatch])
        emptying = emptying or (not filling and part == _DOWN and microbatch == last)
    return ranks


class _SlotMemory:
    """A rank's memory after each slot, and its due weight gradients. Those without their own slot use free ones."""

    def __init__(self, slots: Slots) -> None:
        self._implied = len(slots) == _WEIGHTS
        self._part_at = _parts_by_slot(slots)
        self._held, self._due = [0], [0]
        held = num_due = 0
        for part in self._part_at:
            if part == _FREE:
                if self._implied and num_due:
                    held, num_due = held - 1, num_due - 1
            elif part <= _UP:
                held += 1
            elif part == _WEIGHTS:
                held -= 1
            elif self._implied:
                num_due += 1
            self._held.append(held)
            self._due.append(num_due)

    @property
    def peak(self) -> int:
        return max(self._held)

    def move_forward(self, slot: int, earliest: int, limit: int) -> int:
        """Move the content of a slot to the first free slot from `earliest` on that keeps the memory within `limit`.

        Return its new slot, which may be the old one.
        """
        part_at = self._part_at
        begin = earliest if self._implied else self._first_possible(slot, earliest, limit)
        for place in range(begin, slot):
            if part_at[place] == _FREE and self._move(slot, place, limit):
                return place
        return slot

    def _first_possible(self, slot: int, earliest: int, limit: int) -> int:
        """Return the first slot from which there is room for what is moved, if weight gradients have slots."""
        if self._part_at[slot] not in (_DOWN, _UP):
            return earliest
        held, place = self._held, slot
        while place > earliest and held[place] < limit:
            place -= 1
        return place

    def _move(self, slot: int, place: int, limit: int) -> bool:
        part_at = self._part_at
        part = part_at[slot]
        part_at[place], part_at[slot] = part, _FREE
        if self._implied:
            return self._move_implied(slot, place, limit)
        # In between there is one more or one less, and there is room for it (`_first_possible`).
        change = {_DOWN: 1, _UP: 1, _WEIGHTS: -1}.get(part, 0)
        if change:
            self._held[place + 1 : slot + 1] = [held + change for held in self._held[place + 1 : slot + 1]]
        return True

    def _move_implied(self, slot: int, place: int, limit: int) -> bool:
        """Return what is held from the new place on, counted as at its creation. Most of the time of a long
        schedule."""
        part_at, old_held, old_due = self._part_at, self._held, self._due
        held, num_due = old_held[place], old_due[place]
        new_held, new_due = [], []
        for each in range(place, len(part_at)):
            there = part_at[each]
            if there == _FREE:
                if num_due:
                    held, num_due = held - 1, num_due - 1
            elif there <= _UP:
                held += 1
                if held > limit:
                    part_at[slot], part_at[place] = part_at[place], _FREE
                    return False
            else:
                num_due += 1
            if each >= slot and held == old_held[each + 1] and num_due == old_due[each + 1]:
                break
            new_held.append(held)
            new_due.append(num_due)
        old_held[place + 1 : place + 1 + len(new_held)] = new_held
        old_due[place + 1 : place + 1 + len(new_due)] = new_due
        return True


def _play(ranks: list[Slots]) -> list[Slots]:
    """Run everything in its order, each as early as it can."""
    played = [[[0] * len(row) for row in slots] for slots in ranks]
    free = [0] * len(ranks)
    for _, rank, part, microbatch in _in_order(ranks):
        slot = _last_need(played, rank, part, microbatch) + 1
        if slot < free[rank]:
            slot = free[rank]
        played[rank][part][microbatch] = slot
        free[rank] = slot + 1
    return played


def _order(slots: Slots, stages: tuple[int, ...]) -> list[Instruction]:
    """Name the instructions of a rank's slots. Of the weight gradients due, those of the upper chunk come first."""
    down, up = stages
    kinds = {_DOWN: (Kind.F, down), _UP: (Kind.F, up), _UP_GRADIENT: (Kind.I, up), _DOWN_GRADIENT: (Kind.I, down)}
    order: list[Instruction] = []
    due: dict[int, list[Instruction]] = {up: [], down: []}
    for _, _, part, microbatch in _in_order([slots]):
        if part == _WEIGHTS:
            order.append((due[up] or due[down]).pop(0))
            continue
        kind, stage = kinds[part]
        order.append(Instruction(kind, stage, microbatch))
        if kind is Kind.I:
            due[stage].append(Instruction(Kind.W, stage, microbatch))
    return order
