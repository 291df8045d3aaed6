"""Whether the model of a recipe can be split as a plan says: asked before ranks are started, or a job is submitted."""

import torch
from torch import Tensor, nn

from shardwise.engine.plan_check import check_compiles
from shardwise.engine.prepare import in_keys
from shardwise.errors import ShardwiseError
from shardwise.planner.composition import check_composition
from shardwise.planner.plan import Plan
from shardwise.sharding.expert.shard import check_experts
from shardwise.sharding.tensor.regions import OR_WHOLE
from shardwise.sharding.tensor.shard import check_divisible
from shardwise.stages.split.split import stage_costs
from shardwise.stages.stage import Batch
from shardwise.training.recipe import Recipe
from shardwise.training.subject import Subject


def check_plan(recipe: Recipe, plan: Plan, subject: Subject) -> None:
    """Refuse a plan that cannot run, and a model with fewer parts than the plan has ranks for them.

    The module is made on the meta device, where nothing is computed.
    """
    check_keys(recipe, plan)
    if plan.tp == 1 and plan.ep == 1 and plan.layers is None:
        return
    example = _example(recipe, plan, subject)
    if plan.ep > 1:
        check_experts(subject.sample(), plan.ep)
    if plan.tp > 1:
        _check_layers(subject.sample(), plan.tp, example)
    if plan.layers is not None:
        module = subject.make(tp=plan.tp, device=torch.device("meta"))
        try:
            stage_costs(module, plan.num_stages or plan.pp, example, cut=plan.layers)
        except ShardwiseError as error:
            raise in_keys(error) from None


def check_keys(recipe: Recipe, plan: Plan) -> None:
    """Refuse what needs no model to be seen: keys that cannot be combined, and rows that cannot be divided evenly."""
    check_composition(plan)
    if recipe.compile == "on":
        try:
            check_compiles(plan)
        except ShardwiseError as error:
            raise ShardwiseError(error.problem, remedy="--set compile=off, or a plan of dp and pp") from None
    _check_rows(recipe, plan)


def _check_rows(recipe: Recipe, plan: Plan) -> None:
    """Refuse a batch that cannot be divided evenly over replicas and microbatches."""
    rows, pieces = recipe.batch, plan.dp * plan.microbatches
    if rows % pieces:
        shared = [f"{key}={getattr(plan, key)}" for key in ("dp", "microbatches") if getattr(plan, key) > 1]
        sizes = [str(each) for each in (rows - rows % pieces, rows - rows % pieces + pieces) if each]
        raise ShardwiseError(
            f"a batch of {rows} rows cannot be divided evenly under {','.join(shared)}",
            remedy=" or ".join(f"--set batch={size}" for size in sizes),
        )


def _check_layers(module: nn.Module, num_ranks: int, example: Batch) -> None:
    try:
        check_divisible(module, num_ranks, example)
    except ShardwiseError as error:
        # A recipe cannot say which layers stay whole.
        raise ShardwiseError(error.problem, remedy=(error.remedy or "").partition(OR_WHOLE)[0] or None) from None


def _example(recipe: Recipe, plan: Plan, subject: Subject) -> dict[str, Tensor]:
    """Return a microbatch on the meta device."""
    rows = recipe.batch // (plan.dp * plan.microbatches)
    return {name: each[:rows].to("meta") for name, each in subject.example(recipe.batch).items()}
