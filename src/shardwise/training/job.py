"""What every rank of a run is told."""

from dataclasses import dataclass
from pathlib import Path

from shardwise.planner.plan import Plan
from shardwise.training.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a run is told."""

    recipe: Recipe
    plan: Plan
    folder: Path
    command: str
