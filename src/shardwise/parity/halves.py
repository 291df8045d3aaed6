"""The second course of a check: weights in bf16, with fp32 master weights in the optimizers.

One device does the same in plain torch, with its own master weights. Rounding differs, so both are judged by their
errors against fp32 (`rounding.py`). A plan in fp8 runs this course in fp8; it and one device in fp8 are judged against
one device in bf16. On a device without 8-bit products these are emulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardwise import environment
from shardwise.engine.fp8_layers import use_fp8
from shardwise.parity.course import Course, own_names
from shardwise.parity.legs import LEAST_STEPS, Leg
from shardwise.parity.problem import MakeProblem, Problem
from shardwise.parity.ranks import train_on_rank
from shardwise.parity.reference import train_reference
from shardwise.parity.rounding import MOST_DRAWS, Rounding, judge, nudge
from shardwise.planner.composition import composes
from shardwise.planner.plan import Plan
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from shardwise.stages.stage import Batch

#: One step after the save and load.
NUM_STEPS = LEAST_STEPS


def precision_of(plan: Plan) -> str:
    """Return the precision of this course: bf16, or the plan's own if that is fp8."""
    return "bf16" if plan.fp8_scales is None else plan.precision


def why_not(plan: Plan, problem: Problem) -> str | None:
    """Return the reason why a plan or a module cannot have this course, or None."""
    if len(problem.batches) < NUM_STEPS:
        return f"fewer than {NUM_STEPS} steps"
    if plan.schedule == "pipedream-2bw":
        return "pipedream-2bw steps on 16-bit weights in place, without masters"
    if any(each.dtype != torch.float32 for each in problem.module.parameters()):
        return "the module has weights that are not of 32 bits"
    precision = precision_of(plan)
    return None if composes(replace(plan, precision=precision)) else f"the plan does not run in {precision}"


def check_halves(plan: Plan, make: MakeProblem, ranks: Ranks, *, device: str, timeout_seconds: float) -> Rounding | str:
    """Compare a plan in bf16 or fp8 with one device; or return the reason why that cannot be done."""
    halved = replace(plan, precision=precision_of(plan))
    against = "fp32" if halved.fp8_scales is None else "bf16"
    legs = [Leg(plan=halved, first=0, stop=NUM_STEPS - 1), Leg(plan=halved, first=NUM_STEPS - 1, stop=NUM_STEPS)]
    alone: list[Course] = []

    def draw(seed: int) -> Course:
        problem = half(nudge(make().on(device), seed))
        if halved.fp8_scales is not None:
            use_fp8(problem.module, halved.fp8_scales, torch.device(device))
        return _once(train_reference(problem, halved, "every step", legs, whole=False), problem)

    try:
        problem = wide(make().on(device)) if against == "fp32" else half(make().on(device))
        exact = _once(train_reference(problem, replace(plan, precision=against), "every step", legs), problem)
        alone.append(draw(0))
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return f"one device cannot train the module in {halved.precision}: {why}"
    try:
        found = ranks.run(_train, halved, make, legs, timeout_seconds=timeout_seconds)
    except RankError as error:
        if "shardwise.errors.ShardwiseError" not in error.problem:
            raise
        return f"refused: {error.problem.splitlines()[0]}"
    return replace(_judged(exact, alone, found, draw), precision=halved.precision, against=against)


def _once(course: Course, problem: Problem) -> Course:
    """Return the course with each weight under its first name only, as for master weights."""
    names = own_names(problem.module)
    steps = [
        replace(step, weights={name: each for name, each in step.weights.items() if name in names})
        for step in course.steps
    ]
    return replace(course, steps=steps)


def _judged(exact: Course, alone: list[Course], found: Sequence[Course], draw: Callable[[int], Course]) -> Rounding:
    """Sample one device again while the plan's errors are too large."""
    judged = judge(exact, alone, found)
    for seed in range(1, MOST_DRAWS):
        if judged.problem is None:
            break
        alone.append(draw(seed))
        judged = judge(exact, alone, found)
    return judged


def _train(plan: Plan, make: MakeProblem, legs: Sequence[Leg]) -> Course:
    with environment.changed({environment.EMULATE_FP8: "1"}):
        return train_on_rank(plan, partial(_made_half, make), None, "every step", False, legs)


def _made_half(make: MakeProblem) -> Problem:
    return half(make())


def half(problem: Problem) -> Problem:
    """Return the problem with weights in bf16, and a few steps."""
    problem.module.to(torch.bfloat16)
    return _with_batches(problem, lambda each: each.bfloat16() if each.dtype is torch.float32 else each)


def wide(problem: Problem) -> Problem:
    """Return the problem with the values of `half` in fp32."""
    problem = half(problem)
    problem.module.float()
    return _with_batches(problem, lambda each: each.float() if each.dtype is torch.bfloat16 else each)


def _with_batches(problem: Problem, change: Callable[[Tensor], Tensor]) -> Problem:
    def changed(batch: Batch) -> Batch:
        return {name: change(each) if isinstance(each, Tensor) else each for name, each in batch.items()}

    batches = [changed(each) for each in problem.batches[:NUM_STEPS]]
    return replace(problem, batches=batches, held_out=changed(problem.evaluated))
