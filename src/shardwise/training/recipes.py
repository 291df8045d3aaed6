"""The recipes that have names: a function each, which returns a value.

`bytes` is what `shardwise train` does when nothing is said: a small transformer that reads bytes, on text that every
machine has. `tiny` is the same in seconds, to try things with.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from shardwise.errors import ShardwiseError, unknown
from shardwise.training.recipe import (
    CheckpointChoice,
    DataChoice,
    EvaluationChoice,
    ModelChoice,
    OptimizerChoice,
    Recipe,
    read_recipe,
)


def bytes_recipe() -> Recipe:
    """A transformer of 0.86 million parameters; two cores need about two minutes."""
    return Recipe()


def tiny_recipe() -> Recipe:
    """The smallest that still has every part."""
    return Recipe(
        name="tiny",
        steps=8,
        batch=8,
        log=2,
        model=ModelChoice(width=32, layers=2, heads=2),
        data=DataChoice(sequence=32, limit_bytes=100_000),
        optimizer=OptimizerChoice(warmup=2),
        checkpoint=CheckpointChoice(every=4),
        evaluation=EvaluationChoice(every=4, batches=1, sample=16),
    )


RECIPES: Mapping[str, Callable[[], Recipe]] = {"bytes": bytes_recipe, "tiny": tiny_recipe}


def get_recipe(word: str) -> Recipe:
    """The recipe of this name, or in this file."""
    if word in RECIPES:
        return RECIPES[word]()
    path = Path(word)
    if path.suffix or "/" in word or path.is_file():
        return read_recipe(path)
    error = unknown("recipe", word, RECIPES)
    raise ShardwiseError(
        error.problem, remedy=f"shardwise train {error.remedy or next(iter(RECIPES))}, or the path of a TOML file"
    )
