"""Greedy list scheduling: pack forwards, input gradients and weight gradients onto ranks in order of time.

A free rank takes the instruction that its policy prefers, among those whose input has arrived and that fit into its
memory. Weight gradients fill gaps, or free memory. Nothing is known ahead except values already in transit.

Memory cannot deadlock. The oldest microbatch of a rank may take the last free memory; any other must leave enough for
the chunks that the oldest has still to run. So the oldest always completes, and then the next is the oldest. Only a
strictly fixed order can be impossible, and then there is no packing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.placement import Placement
from shardwise.schedule.prices import Prices

_CLOSE = 1e-9

#: For each rank its forwards and input gradients, and its weight gradients where they have places, in order.
Sequences = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The preferences of a free rank.

    With `sequences`, it follows an order. If the next instruction's input has not arrived, it considers the next
    `look_ahead` instructions, and takes one that is no longer than the gap divided by `patience`. Without `sequences`,
    it takes an input gradient whenever one has arrived (`backward_first`) or alternates with forwards; deeper chunks
    come first. A weight gradient without a place in the order fills a gap of at least `gap_share` of its length.
    """

    gap_share: float = 0.0
    backward_first: bool = True
    deepest_backward_first: bool = True
    sequences: Sequences | None = None
    look_ahead: int = 1
    patience: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Orders, their span and makespan, and the seconds per microbatch in the steady state (`pace`)."""

    orders: list[list[Instruction]]
    span: float
    makespan: float
    pace: float


def pack(
    placement: Placement, num_microbatches: int, prices: Prices, memory: tuple[float, ...], policy: Policy
) -> Packed | None:
    """Return packed orders, or None if the policy's order does not fit into memory."""
    return _Packer(placement, num_microbatches, prices, memory, policy).run()


class _Packer:
    def __init__(
        self, placement: Placement, num_microbatches: int, prices: Prices, memory: tuple[float, ...], policy: Policy
    ) -> None:
        self.placement, self.count, self.policy, self.memory = placement, num_microbatches, policy, memory
        self.ranks = placement.ranks
        stages, num_ranks = range(placement.num_stages), placement.num_ranks
        # The previous and the next stage of each on its pipe; and the first microbatch of its pipe.
        self.above: list[int | None] = [None] * len(stages)
        self.below: list[int | None] = [None] * len(stages)
        first_microbatch = [0] * len(stages)
        self.turns = len(placement.pipes)
        for turn, pipe in enumerate(placement.pipes):
            for stage, behind in pairwise(pipe):
                self.below[stage], self.above[behind] = behind, stage
            for stage in pipe:
                first_microbatch[stage] = turn
        self.seconds = {
            kind: [prices.seconds(Instruction(kind, stage, 0), self.ranks[stage]) for stage in stages]
            for kind in (Kind.F, Kind.I, Kind.W)
        }
        self.hop_down = [self._hop(prices, Kind.SEND_F, stage, self.below[stage]) for stage in stages]
        self.hop_up = [self._hop(prices, Kind.SEND_B, stage, self.above[stage]) for stage in stages]
        self.taken = prices.held(Instruction(Kind.F, 0, 0))[0]
        self.freed_by_input = -prices.held(Instruction(Kind.I, 0, 0))[1]
        self.freed_by_weights = -prices.held(Instruction(Kind.W, 0, 0))[1]
        # Arrival time of the input of each microbatch on each stage; inf while unknown.
        self.forward_at = [[inf] * num_microbatches for _ in stages]
        self.backward_at = [[inf] * num_microbatches for _ in stages]
        for pipe in placement.pipes:
            self.forward_at[pipe[0]] = [0.0] * num_microbatches
        self.next_forward, self.next_backward = first_microbatch.copy(), first_microbatch.copy()
        # A started instruction is moved to the front of the remaining order of its rank, and the front advances.
        self.sequences = [list(sequence) for sequence in policy.sequences or ()]
        self.front = [0] * num_ranks
        self.weights_have_places = any(instruction.kind is Kind.W for order in self.sequences for instruction in order)
        self.due: list[list[Instruction]] = [[] for _ in range(num_ranks)]
        self.next_due = [0] * num_ranks
        self.held, self.free_at = [0.0] * num_ranks, [0.0] * num_ranks
        self.backward_was_last = [True] * num_ranks
        self.orders: list[list[Instruction]] = [[] for _ in range(num_ranks)]
        self.started = [inf] * num_ranks
        self.out_at = [0.0] * num_microbatches
        self.events = [(0.0, rank) for rank in range(num_ranks)]

    def _hop(self, prices: Prices, kind: Kind, stage: int, peer: int | None) -> float:
        if peer is None:
            return 0.0
        source, target = self.ranks[stage], self.ranks[peer]
        return prices.hop_seconds(Instruction(kind, stage, 0, peer), source, target)[0] if source != target else 0.0

    def run(self) -> Packed | None:
        choose = self._choose_freely if self.policy.sequences is None else self._choose_in_order
        events, free_at = self.events, self.free_at
        gap_share, weight_seconds = self.policy.gap_share, self.seconds[Kind.W]
        while events:
            now, rank = heappop(events)
            if free_at[rank] > now + _CLOSE:
                continue
            chosen, arrival = choose(rank, now)
            if chosen is None and self.next_due[rank] < len(self.due[rank]):
                weights = self.due[rank][self.next_due[rank]]
                if arrival - now >= gap_share * weight_seconds[weights.stage] - _CLOSE:
                    chosen = weights
            if chosen is not None:
                self._start(chosen, rank, now)
            elif arrival < inf:
                heappush(events, (arrival, rank))
        num_computed = 3 * sum(len(self.placement.pipe(microbatch)) for microbatch in range(self.count))
        if sum(map(len, self.orders)) < num_computed:
            return None
        span = max(free - start for free, start in zip(free_at, self.started, strict=True))
        return Packed(orders=self.orders, span=span, makespan=max(free_at), pace=self._pace())

    def _pace(self) -> float:
        early, late = self.count // 4, self.count - 1 - self.count // 4
        return (self.out_at[late] - self.out_at[early]) / (late - early) if late > early else 0.0

    def _choose_in_order(self, rank: int, now: float) -> tuple[Instruction | None, float]:
        """Return the next instruction of the order, if its input has arrived; else a later one that fits the gap."""
        arrival = inf
        met: set[tuple[Kind, int]] = set()
        sequence, front = self.sequences[rank], self.front[rank]
        for instruction in sequence[front : front + self.policy.look_ahead]:
            kind, stage, microbatch, _, _ = instruction
            if kind is Kind.W:
                return (instruction if not met else None), arrival
            is_next = not met
            if (kind, stage) in met:
                continue
            met.add((kind, stage))
            if kind is Kind.F and not self._has_room(rank, microbatch, strictly=not is_next):
                continue
            at = (self.forward_at if kind is Kind.F else self.backward_at)[stage][microbatch]
            if at > now + _CLOSE:
                arrival = min(arrival, at)
            elif is_next or (arrival - now) >= self.policy.patience * self.seconds[kind][stage] - _CLOSE:
                return instruction, inf
        return None, arrival

    def _choose_freely(self, rank: int, now: float) -> tuple[Instruction | None, float]:
        """Return the preferred instruction among those that may start; else the time of the next arrival."""
        stages = self.placement.stages[rank]
        deepest_first = stages[::-1]
        back, back_arrival = self._find_backward(deepest_first if self.policy.deepest_backward_first else stages, now)
        if back is not None and (self.policy.backward_first or not self.backward_was_last[rank]):
            return back, inf
        ahead, ahead_arrival = self._find_forward(deepest_first, rank, now)
        return ahead or back, min(back_arrival, ahead_arrival)

    def _find_backward(self, stages: Iterable[int], now: float) -> tuple[Instruction | None, float]:
        arrival = inf
        for stage in stages:
            microbatch = self.next_backward[stage]
            if microbatch < self.next_forward[stage]:
                at = self.backward_at[stage][microbatch]
                if at <= now + _CLOSE:
                    return Instruction(Kind.I, stage, microbatch), inf
                arrival = min(arrival, at)
        return None, arrival

    def _find_forward(self, stages: Iterable[int], rank: int, now: float) -> tuple[Instruction | None, float]:
        arrival = inf
        for stage in stages:
            microbatch = self.next_forward[stage]
            if microbatch < self.count and self._has_room(rank, microbatch, strictly=True):
                at = self.forward_at[stage][microbatch]
                if at <= now + _CLOSE:
                    return Instruction(Kind.F, stage, microbatch), inf
                arrival = min(arrival, at)
        return None, arrival

    def _has_room(self, rank: int, microbatch: int, *, strictly: bool) -> bool:
        """Whether a forward fits and, if `strictly`, leaves room for the remaining chunks of the oldest microbatch."""
        room = self.memory[rank] - self.held[rank] - self.taken + _CLOSE
        if room < 0 or not strictly:
            return room >= 0
        stages, ahead = self.placement.stages[rank], self.next_forward
        oldest = min([self.next_backward[stage] for stage in stages])
        return microbatch == oldest or room >= self.taken * sum([ahead[stage] <= oldest for stage in stages])

    def _start(self, instruction: Instruction, rank: int, now: float) -> None:
        kind, stage, microbatch, _, _ = instruction
        end = now + self.seconds[kind][stage]
        if now < self.started[rank]:
            self.started[rank] = now
        if kind is Kind.F:
            self._start_forward(stage, microbatch, rank, end)
        elif kind is Kind.I:
            self._start_backward(stage, microbatch, rank, end)
        else:
            self.next_due[rank] += 1
            self.held[rank] -= self.freed_by_weights
        if self.sequences and (kind is not Kind.W or self.weights_have_places):
            sequence, front = self.sequences[rank], self.front[rank]
            if sequence[front] is not instruction:
                sequence.insert(front, sequence.pop(sequence.index(instruction, front)))
            self.front[rank] += 1
        self.orders[rank].append(instruction)
        self.free_at[rank] = end
        heappush(self.events, (end, rank))

    def _start_forward(self, stage: int, microbatch: int, rank: int, end: float) -> None:
        self.next_forward[stage] += self.turns
        self.held[rank] += self.taken
        self.backward_was_last[rank] = False
        below = self.below[stage]
        if below is None:
            self.backward_at[stage][microbatch] = end
            return
        arrival = end + self.hop_down[stage]
        self.forward_at[below][microbatch] = arrival
        heappush(self.events, (arrival, self.ranks[below]))

    def _start_backward(self, stage: int, microbatch: int, rank: int, end: float) -> None:
        self.next_backward[stage] += self.turns
        self.held[rank] -= self.freed_by_input
        self.backward_was_last[rank] = True
        if not self.weights_have_places:
            self.due[rank].append(Instruction(Kind.W, stage, microbatch))
        above = self.above[stage]
        if above is None:
            self.out_at[microbatch] = end
            return
        arrival = end + self.hop_up[stage]
        self.backward_at[above][microbatch] = arrival
        heappush(self.events, (arrival, self.ranks[above]))
