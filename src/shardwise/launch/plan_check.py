"""Refuse a plan that the model cannot have, before anything is written or submitted.

Token files, models and modules of one's own may be on the machines alone: what cannot be read here is checked there.
"""

from shardwise.errors import ShardwiseError
from shardwise.launch.work import Work, arguments_of
from shardwise.planner.plan import Plan
from shardwise.serving import plan_check as serving
from shardwise.training import plan_check as training
from shardwise.training.command import recipe_of
from shardwise.training.data.source import check_data
from shardwise.training.recipe import Recipe
from shardwise.training.subject import subject_of


def check_work(work: Work) -> None:
    """Refuse the plan of a training or a server, if it has one."""
    if work.plan is None:
        return
    arguments = arguments_of(work)
    if work.kind == "train":
        _check_training(recipe_of(arguments), work.plan)
    else:
        serving.check_plan(arguments.model, work.plan, random_weights=arguments.random_weights)


def _check_training(recipe: Recipe, plan: Plan) -> None:
    training.check_keys(recipe, plan)
    if recipe.model.source is not None:  # Its factory would make the whole module here.
        return
    try:
        subject = subject_of(recipe, check_data(recipe.data, verify=False))
    except ShardwiseError:
        return
    training.check_plan(recipe, plan, subject)
