"""A training in legs: it is saved and resumed in a new engine, first under the same plan, then under another.

steps    0 1 2 3 4  │  5 6  │  7
engine   the plan's │  same │  another plan's, on as many ranks
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.planner.composition import composes
from shardwise.planner.plan import Plan
from shardwise.stages.batch import length_of
from shardwise.stages.stage import Batch

#: With fewer steps a training is one leg.
LEAST_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """The steps from `first` to before `stop`, by one engine of a plan."""

    plan: Plan
    first: int
    stop: int

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate after a step: the last one, and the first, which is followed by more steps."""
        return step in (self.first, self.stop - 1)


def one_leg(plan: Plan, num_steps: int) -> list[Leg]:
    """Return the legs of a training without interruption."""
    return [Leg(plan=plan, first=0, stop=num_steps)]


def legs_of(plan: Plan, batches: Sequence[Batch]) -> list[Leg]:
    """Return the legs of a training that is interrupted twice, or once if no other plan fits the batches."""
    num_steps, num_rows = len(batches), length_of(batches[0])
    if num_steps < LEAST_STEPS:
        return one_leg(plan, num_steps)
    other = find_other(plan, num_rows)
    stop = num_steps - 1 if other is not None else num_steps
    middle = max(2, stop - 2)
    legs = [Leg(plan=plan, first=0, stop=middle), Leg(plan=plan, first=middle, stop=stop)]
    return legs if other is None else [*legs, Leg(plan=other, first=stop, stop=num_steps)]


def is_other(leg: Leg, legs: Sequence[Leg]) -> bool:
    """Return whether a leg has another plan than the first."""
    return leg.plan != legs[0].plan


def find_other(plan: Plan, num_rows: int) -> Plan | None:
    """Return a plan of as many ranks that shards weights and states differently; None for one rank or too few rows."""
    count = plan.num_ranks
    plain = Plan(dp=count, precision=plan.precision)
    for zero in (1, 3, 0):
        other = replace(plain, zero=zero)
        is_new = plan.dp != count or plan.ep > 1 or abs(zero - plan.zero) > 1
        if count > 1 and is_new and num_rows % count == 0 and composes(other):
            return other
    return None
