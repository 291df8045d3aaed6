"""The description of a run that every rank receives."""

from dataclasses import dataclass
from pathlib import Path

from shardwise.planner.plan import Plan
from shardwise.training.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """How a run is monitored.

    Every `verify_every` steps, one is repeated and weights are compared (0: never). With `leaves_out_slow`, a run stops
    when a rank is slow, so that a launcher can restart it without that host. Metrics for Prometheus are served at
    `port` of `host`, or written to `file`.
    """

    verify_every: int = 0
    leaves_out_slow: bool = False
    host: str = "127.0.0.1"
    port: int | None = None
    file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The description of a run that every rank receives. The precision is the plan's.

    `compile`: whether blocks are compiled. `is_chosen`: that is our choice, not the user's, so it is given up if it
    fails. `said` is the line that reports our choices. `seats` are the devices of the ranks, if not in plain order.
    `copies_every` is the number of steps between copies in memory: 0 means no copies, None as often as is cheap.
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
