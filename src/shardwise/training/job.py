"""What every rank of a run is told."""

from dataclasses import dataclass
from pathlib import Path

from shardwise.planner.plan import Plan
from shardwise.training.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a run is told. The precision is the plan's.

    `compile`: whether blocks are compiled. If that `is_chosen` here, and not by the user, it
    is given up where it fails.
    `said` is what a person is told of what was chosen.
    """

    recipe: Recipe
    plan: Plan
    folder: Path
    command: str
    compile: bool = False
    is_chosen: bool = False
    said: str | None = None
