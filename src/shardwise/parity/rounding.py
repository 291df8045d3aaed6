"""The rounding errors of a plan in bf16 against fp32, compared with those of one device; for fp8 likewise against bf16.

One device in fp32 is taken as exact. One device in bf16 and the plan in bf16 are compared with it. Both round at the
same places, but with different errors, as sums have another order and partial sums of tp and cp are rounded too. So
errors of a single number are not comparable, but those of many are: each is a sample of about the same distribution.
It is bimodal if rounding decides which expert a token goes to: one device, with its weights perturbed by less than the
resolution of bf16, has an error of .02, or in three of eight samples of .14 (the model `latent`, three steps). So if
the plan's error is larger, one device is sampled again, up to sixteen times, and its largest error counts. A tensor's
largest error is taken over all layers, as such a token may be in another layer each time. The criteria:

    all tensors of a kind     the root of the mean square of their relative errors is at most FACTOR of one device's,
                              in every step
    every tensor              at most TENSOR_FACTOR of its like's on one device, or of the mean over all tensors there
    a loss, also evaluated    over the steps at most FACTOR of one device's, or half a step of bf16 (2^-9), below which
                              one device may be exact by chance
    a norm                    the same with a whole step: a rounding near the loss is in every gradient (GPT-2 under
                              tp=2 on an H200: 2.2e-3, while no tensor's error exceeds one device's)

The error of a gradient that is not summed, or is scaled by 2, is 10 to 100 times as large as these limits.
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
#: The most samples of one device in bf16, and the relative perturbation of its weights from the second sample on.
MOST_DRAWS, NUDGE = 16, 2.0**-12
STEP = 2.0**-8
_TENSORS: tuple[Kind, ...] = ("gradient", "weight")
_NUMBERS: tuple[Kind, ...] = ("loss", "norm", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Errors of a precision against a wider one, by kind, of the plan and of one device; and the problem, if any."""

    plan: dict[str, float]
    alone: dict[str, float]
    problem: str | None
    precision: str = "bf16"
    against: str = "fp32"


@torch.no_grad()
def nudge(problem: Problem, seed: int) -> Problem:
    """Perturb every weight slightly, or not at all for seed 0."""
    names = [name for name, _ in (*problem.module.named_parameters(), *problem.module.named_buffers())]
    materialise(problem.module, names)  # As the reference would do.
    for parameter in problem.module.parameters() if seed else ():
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        parameter.mul_(1 + NUDGE * drawn.to(parameter))
    return problem


def judge(exact: Course, alone: Sequence[Course], found: Sequence[Course]) -> Rounding:
    """Compare a plan's errors with those of one device, which has been sampled several times."""
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
    """Return the problem with the tensors of a step, if any. Steps are judged separately: the first rounds least."""
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
    """Return the name without its numbers, which corresponding tensors of all layers share."""
    return re.sub(r"\d+", "*", difference.name or "")
