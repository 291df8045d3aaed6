"""Whether a plan's bf16 is as close to fp32 as one device's bf16 is.

Three trainings: one device in fp32, which is taken for exact; one device in bf16; the plan in bf16. The two in bf16
round at the same places and see other roundings, as sums come in another order and partial sums of tp and cp are
rounded too. So the errors of a single number are not comparable, and those of many are: each is a draw from about the
same distribution. What is asked:

    all tensors of a kind     the root of the mean square of their relative errors is at most FACTOR of one device's
    every tensor              at most TENSOR_FACTOR of its own on one device, or of the mean over all tensors there
    a loss, a norm            over the steps at most FACTOR of one device's, or half a step of bf16 (2^-9), below which
                              one device may be right by chance

A gradient that is not summed, or scaled by 2, is off by 10 to 100 times as much as these allow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.parity.compare import Comparison, Kind, compare
from shardwise.parity.course import Course

FACTOR = 2.0
TENSOR_FACTOR = 4.0
HALF_STEP = 2.0**-9
_TENSORS: tuple[Kind, ...] = ("gradient", "weight")
_NUMBERS: tuple[Kind, ...] = ("loss", "norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Errors against fp32 by kind, of the plan and of one device, and what is wrong."""

    plan: dict[str, float]
    alone: dict[str, float]
    problem: str | None


def judge(exact: Course, alone: Course, found: Sequence[Course]) -> Rounding:
    """Hold a plan's bf16 against one device's."""
    ours, theirs = compare(exact, found, limit=math.inf), compare(exact, [alone], limit=math.inf)
    plan = {str(kind): _mean(ours, kind) for kind in (*_NUMBERS, *_TENSORS)}
    one = {str(kind): _mean(theirs, kind) for kind in (*_NUMBERS, *_TENSORS)}
    problem = None
    for kind in (*_NUMBERS, *_TENSORS):
        limit = max(FACTOR * one[kind], HALF_STEP if kind in _NUMBERS else 0.0)
        if not plan[kind] <= limit:
            problem = problem or f"the {kind} is off by {plan[kind]:.1e}, one device's by {one[kind]:.1e}"
    for kind in _TENSORS:
        problem = problem or _worst_tensor(ours, theirs, kind, one[kind])
    return Rounding(plan=plan, alone=one, problem=problem)


def _mean(comparison: Comparison, kind: Kind) -> float:
    errors = [each.error for each in comparison.differences if each.kind == kind]
    return math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else 0.0


def _worst_tensor(ours: Comparison, theirs: Comparison, kind: Kind, mean: float) -> str | None:
    known = {(each.name, each.step): each.error for each in theirs.differences if each.kind == kind}
    for each in ours.differences:
        if each.kind == kind and each.error > TENSOR_FACTOR * max(known.get((each.name, each.step), 0.0), mean):
            error = known.get((each.name, each.step), 0.0)
            return f"the {kind} of {each.name} is off by {each.error:.1e}, one device's by {error:.1e}"
    return None
