"""What a rank holds of a small model's state after a step under a plan."""

import torch

from shardwise.engine.parallelize import parallelize
from shardwise.parity.models import default_settings, problem_of
from shardwise.planner.plan import Plan
from tests.stages.small import small_matrices


def bytes_a_parameter(text: str, is_half: bool) -> tuple[float, float, float, bool]:
    """Of parameters, gradients and optimizer; and whether weights are their masters, rounded."""
    plan = Plan.parse(text)
    with small_matrices():
        problem = problem_of(default_settings(plan), plan, 1)()
        module = problem.module.bfloat16() if is_half else problem.module
        count = sum(each.numel() for each in module.parameters())
        engine = parallelize(
            module, plan, loss=problem.loss, optimizer=torch.optim.AdamW, example=problem.batches[0], clip=1.0
        )
        engine.train_step(problem.batches[0])
        held = engine.states.data.held()
        buckets = engine.states.data.buckets
        rounded = all(torch.equal(each.kept.to(each.weights.shard.dtype), each._follower) for each in buckets)
        masters = all(each.kept.dtype is torch.float32 for each in buckets)
        engine.close()
    return held.parameters / count, held.gradients / count, held.optimizer / count, rounded and masters
