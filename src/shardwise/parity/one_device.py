"""One device beside a check: what fails there already, and whether ranks train on parts of a batch, not on the
whole."""

from collections.abc import Sequence

import torch

from shardwise.errors import ShardwiseError
from shardwise.parity.compare import compare
from shardwise.parity.course import Course
from shardwise.parity.legs import Leg
from shardwise.parity.problem import MakeProblem, Problem, small_matrices
from shardwise.parity.reference import sees_whole, train_reference
from shardwise.planner.plan import Plan
from shardwise.stages.split.lines import line_of_error

# A loss over a whole batch counts as a sum if it is this close to the number of parts times the loss of a part.
_IS_TIMES = 0.01


def train_alone(problem: Problem, plan: Plan, legs: Sequence[Leg]) -> Course:
    """Train the steps on one device. What fails there is not caused by the plan."""
    try:
        return train_reference(problem, plan, legs=legs)
    except ShardwiseError:
        raise
    except Exception as error:
        raise ShardwiseError(
            f"{type(problem.module).__name__} and its loss cannot be trained on one device already:"
            f" {type(error).__name__}: {error}, at {line_of_error(error)}",
            remedy="a batch that the module takes, and a loss(output, batch) that gives a mean, or a sum and a number",
        ) from error


def find_microbatches(
    plan: Plan, make: MakeProblem, legs: Sequence[Leg], expected: Course, found: Sequence[Course], device: str
) -> str | None:
    """Describe the difference if ranks train what one device trains on microbatches, and not on whole batches."""
    num_parts = plan.dp * plan.microbatches
    with torch.random.fork_rng(devices=[]), small_matrices():
        problem = make().on(device)
        if num_parts == 1 or not sees_whole(problem):
            return None
        cut = train_reference(problem, plan, "every step", legs, whole=False)
    if not compare(cut, found).is_same:
        return None
    whole, parts = expected.steps[0].loss, cut.steps[0].loss
    what = f"the first loss is {whole:.6g} of a whole batch, and {parts:.6g} of its {num_parts} parts"
    if parts and abs(whole / parts / num_parts - 1) < _IS_TIMES:
        return f"{what}: it is a sum without its number"
    return f"{what}: it is a mean of means over unequal numbers, or looks across rows"
