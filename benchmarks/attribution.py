"""Where steps went: do the parts of every rank add up to the step, under ten plans?

What a trace costs is measured by `engine_overhead.py`, on steps that are long enough for it.
"""

import sys
import tempfile
from pathlib import Path

from record import record

from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.trace.stretches import parts_of_ranks
from shardwise.training.job import Job
from shardwise.training.profile import Measured, measure_rank
from shardwise.training.recipe import get_recipe

PLANS = (
    "pp=2,microbatches=4",
    "pp=2,schedule=zb-v,microbatches=4",
    "pp=2,schedule=zb-h1,microbatches=4,recompute=full",
    "dp=2,microbatches=2",
    "dp=2,zero=3",
    "tp=2",
    "cp=2",
    "dp=2,pp=2,microbatches=2,zero=1",
    "tp=2,pp=2,microbatches=2",
    "pp=4,schedule=gpipe,microbatches=4",
)
NUM_STEPS = 12
MOST_OFF = 0.01


def measured_under(plan: str, folder: Path) -> Measured:
    recipe = get_recipe("bytes").changed({"data.limit_bytes": 1_000_000}, source="here")
    job = Job(recipe=recipe, plan=Plan.parse(plan), folder=folder, command="")
    with Ranks(job.plan.num_ranks) as ranks:
        found: Measured = ranks.run(measure_rank, job, NUM_STEPS)[0]
    return found


def main() -> int:
    off = {}
    with tempfile.TemporaryDirectory() as name:
        for plan in PLANS:
            found = measured_under(plan, Path(name) / plan)
            step = found.trace.makespan
            off[plan] = max(abs(sum(parts.values()) / step - 1) for parts in parts_of_ranks(found.trace))
            print(f"{plan:52} parts off by {off[plan]:.1e} of the step")
    record("attribution", {"parts_off": off, "most": MOST_OFF})
    return int(max(off.values()) > MOST_OFF)


if __name__ == "__main__":
    sys.exit(main())
