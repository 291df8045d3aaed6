"""What every rank of a run is told."""

from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.training.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """How a run is looked at while it goes on.

    `verify_every` so many steps one is repeated and weights are compared (0: never). With `leaves_out_slow` a run ends
    when a rank is slow, for a launcher that can do without its host. `port` of `host`, or `file`: where metrics are for
    Prometheus.
    """

    verify_every: int = 0
    leaves_out_slow: bool = False
    host: str = "127.0.0.1"
    port: int | None = None
    file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a run is told. The precision is the plan's.

    `compile`: whether blocks are compiled. If that `is_chosen` here, and not by the user, it
    is given up where it fails.
    `said` is what a person is told of what was chosen. `seats` are the devices that ranks sit on, where that is not
    their own order. `copies_every` is after how many steps a copy goes to memory: 0 is never, None as often as it costs
    little.
    """

    recipe: Recipe
    plan: Plan
    folder: Path
    command: str
    compile: bool = False
    is_chosen: bool = False
    said: str | None = None
    seats: tuple[int, ...] | None = None
    watching: Watching = Watching()
    copies_every: int | None = 0


def check_rows(job: Job) -> None:
    """Refuse a batch that replicas and their microbatches cannot share out evenly."""
    rows, plan = job.recipe.batch, job.plan
    pieces = plan.dp * plan.microbatches
    if rows % pieces:
        shared = [f"{key}={getattr(plan, key)}" for key in ("dp", "microbatches") if getattr(plan, key) > 1]
        sizes = [str(each) for each in (rows - rows % pieces, rows - rows % pieces + pieces) if each]
        raise ShardwiseError(
            f"a batch of {rows} rows cannot be shared out evenly under {','.join(shared)}",
            remedy=" or ".join(f"--set batch={size}" for size in sizes),
        )
