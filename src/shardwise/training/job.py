"""What every rank of a run is told."""

from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError
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

    def check_batch(self) -> None:
        """Refuse rows that the plan cannot share out."""
        batch, plan = self.recipe.batch, self.plan
        num_parts = plan.dp * plan.microbatches
        if batch % num_parts:
            below = batch - batch % num_parts
            raise ShardwiseError(
                f"a batch of {batch} cannot be shared out evenly over dp={plan.dp} replicas with"
                f" microbatches={plan.microbatches} each",
                remedy=" or ".join(f"--set batch={size}" for size in (below, below + num_parts) if size),
            )
