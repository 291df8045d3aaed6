"""Whether a plan's bf16 is as close to fp32 as one device's bf16 is; and in fp8, held against bf16, the same.

One device in fp32 is taken for exact; one device in bf16 and the plan in bf16 are held against it. They round at the
same places and see other roundings, as sums come in another order and partial sums of tp and cp are rounded too. So the
errors of a single number are not comparable, and those of many are: each is a draw from about the same distribution.
That has two humps where a rounding decides which expert a token goes to: one device, with its weights nudged by less
than bf16 can tell apart, is off by .02, or in three of eight draws by .14 (the model `latent`, three steps). So where
the plan is further off, one device is drawn again, up to sixteen times, and its worst counts; a tensor's worst is that
of its like in any layer, as such a token may be in another layer each time. What is asked:

    all tensors of a kind     the root of the mean square of their relative errors is at most FACTOR of one device's,
                              in every step
    every tensor              at most TENSOR_FACTOR of its like's on one device, or of the mean over all tensors there
    a loss, also evaluated    over the steps at most FACTOR of one device's, or half a step of bf16 (2^-9), below which
                              one device may be right by chance
    a norm                    the same with a whole step: a rounding near the loss is in every gradient (GPT-2 under
                              tp=2 on an H200: 2.2e-3, of which no tensor has more than one device has)

A gradient that is not summed, or scaled by 2, is off by 10 to 100 times as much as these allow.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.parity.compare import Comparison, Difference, Kind, compare
from shardwise.parity.course import Course
from shardwise.parity.problem import Problem
from shardwise.stages.split.materialise import materialise

FACTOR = 2.0
TENSOR_FACTOR = 4.0
#: How often one device trains in bf16 at most, and how far its weights are nudged from the second time on.
MOST_DRAWS, NUDGE = 16, 2.0**-12
STEP = 2.0**-8
_TENSORS: tuple[Kind, ...] = ("gradient", "weight")
_NUMBERS: tuple[Kind, ...] = ("loss", "norm", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Errors of a precision by kind, against a wider one, of the plan and of one device, and what is wrong."""

    plan: dict[str, float]
    alone: dict[str, float]
    problem: str | None
    precision: str = "bf16"
    against: str = "fp32"


@torch.no_grad()
def nudge(problem: Problem, seed: int) -> Problem:
    """The same, with every weight a little off; as it is for seed 0."""
    names = [name for name, _ in (*problem.module.named_parameters(), *problem.module.named_buffers())]
    materialise(problem.module, names)  # As the reference would do.
    for parameter in problem.module.parameters() if seed else ():
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        parameter.mul_(1 + NUDGE * drawn.to(parameter))
    return problem


def judge(exact: Course, alone: Sequence[Course], found: Sequence[Course]) -> Rounding:
    """Hold a plan's bf16 against one device's, which has been drawn several times."""
    ours = compare(exact, found, limit=math.inf)
    draws = [compare(exact, [each], limit=math.inf) for each in alone]
    kinds = (*_NUMBERS, *_TENSORS)
    plan = {str(kind): _mean(ours, kind) for kind in kinds}
    one = {str(kind): max(_mean(each, kind) for each in draws) for kind in kinds}
    problem = None
    for kind in _NUMBERS:
        if not plan[kind] <= max(FACTOR * one[kind], STEP if kind == "norm" else STEP / 2):
            problem = problem or f"the {kind} is off by {plan[kind]:.1e}, one device's by {one[kind]:.1e}"
    for kind in _TENSORS:
        for step in range(len(exact.steps)):
            problem = problem or _tensors_of_step(ours, draws, kind, step)
    return Rounding(plan=plan, alone=one, problem=problem)


def _tensors_of_step(ours: Comparison, draws: Sequence[Comparison], kind: Kind, step: int) -> str | None:
    """What is wrong with the tensors of a step. Each step is by itself: the first has the fewest roundings."""
    mean, alone = _mean(ours, kind, step), max(_mean(each, kind, step) for each in draws)
    if not mean <= FACTOR * alone:
        return f"the {kind} is off by {mean:.1e} in step {step}, one device's by {alone:.1e}"
    return _worst_tensor(ours, draws, (kind, step), alone)


def _mean(comparison: Comparison, kind: Kind, step: int | None = None) -> float:
    errors = [each.error for each in comparison.differences if each.kind == kind and step in (None, each.step)]
    return math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else 0.0


def _worst_tensor(ours: Comparison, draws: Sequence[Comparison], which: tuple[Kind, int], mean: float) -> str | None:
    known: dict[str, float] = {}
    for each in (each for draw in draws for each in draw.differences if (each.kind, each.step) == which):
        known[_like(each)] = max(each.error, known.get(_like(each), 0.0))
    for each in ours.differences:
        alone = known.get(_like(each), 0.0)
        if (each.kind, each.step) == which and each.error > TENSOR_FACTOR * max(alone, mean):
            return f"the {each.kind} of {each.name} is off by {each.error:.1e}, one device's by {alone:.1e}"
    return None


def _like(difference: Difference) -> str:
    """What tensors at the same place in other layers share: the name without its numbers."""
    return re.sub(r"\d+", "*", difference.name or "")
