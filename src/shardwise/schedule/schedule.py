"""The schedule: a list of instructions for each rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.schedule.instruction import RECEIVES, SENDS, Instruction, Kind
from shardwise.schedule.placement import Placement

Orders = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What each rank does, in order.

    `num_microbatches` is per step. If `num_steps` is over 1, microbatches are numbered consecutively through all steps.
    `staleness` is how many optimizer steps the weights of a forward may lag behind: 0 waits for the previous step, 1
    keeps two weight versions and never waits (PipeDream-2BW).
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: Orders
    num_steps: int = 1
    staleness: int = 0

    @staticmethod
    def of(
        name: str,
        placement: Placement,
        num_microbatches: int,
        orders: Sequence[Sequence[Instruction]],
        *,
        num_steps: int = 1,
        staleness: int = 0,
    ) -> "Schedule":
        """Make a schedule from plain lists."""
        return Schedule(
            name=name,
            placement=placement,
            num_microbatches=num_microbatches,
            orders=tuple(tuple(order) for order in orders),
            num_steps=num_steps,
            staleness=staleness,
        )

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_instructions(self) -> int:
        return sum(len(order) for order in self.orders)

    @property
    def total_microbatches(self) -> int:
        """Microbatches of all steps together."""
        return self.num_microbatches * self.num_steps

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed apart from those of inputs."""
        return any(part.kind is Kind.W for order in self.orders for each in order for part in each.parts)

    @cached_property
    def communicates(self) -> bool:
        """Whether sends and receives are written out (`passes.communication`) or still implied."""
        return any(
            instruction.kind in SENDS or instruction.kind in RECEIVES for order in self.orders for instruction in order
        )

    @property
    def links(self) -> set[tuple[int, int]]:
        """Which ranks send to which."""
        ranks, every = self.placement.ranks, (each for order in self.orders for each in order)
        return {(ranks[each.stage], ranks[each.peer]) for each in every if each.kind in SENDS and each.peer is not None}

    def step_of(self, microbatch: int) -> int:
        """Return the step that a microbatch's gradient belongs to."""
        return microbatch // self.num_microbatches

    def with_orders(self, orders: Sequence[Sequence[Instruction]]) -> "Schedule":
        """Return the same schedule with other instructions."""
        return replace(self, orders=tuple(tuple(order) for order in orders))
