"""The plan of a run that was given none: what the planner finds for this machine."""

from pathlib import Path

from shardwise.planner.plan import Plan
from shardwise.planner.planning import plan
from shardwise.training.data.documents import STDLIB
from shardwise.training.data.tokenizer import ByteTokenizer
from shardwise.training.data.tokens import open_tokens
from shardwise.training.machine import cluster_here
from shardwise.training.recipe import Recipe
from shardwise.training.subject import subject_of


def choose_plan(recipe: Recipe, num_devices: int) -> Plan:
    """The fastest plan for a recipe's step on so many devices, with its reasons."""
    return plan(
        **subject_of(recipe, vocabulary_of(recipe)).for_planner(),
        cluster=cluster_here(num_devices),
        batch=recipe.batch,
        fixed={"precision": recipe.precision},
    )


def vocabulary_of(recipe: Recipe) -> int:
    """How many tokens the data of a recipe may have."""
    source = recipe.data.source
    return ByteTokenizer.vocabulary if source == STDLIB else open_tokens(Path(source)).vocabulary
