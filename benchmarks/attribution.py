"""Where steps went: do the parts of every rank add up to the step, under ten plans, and what does a trace cost?

Steps of the recipe `bytes` are taken in turn without and with a trace. The cost of a trace is that of the quickest step
of either kind: what else runs on a machine can only make a step longer.
"""

import sys
import tempfile
from pathlib import Path

from record import record

from shardwise.planner.plan import Plan
from shardwise.runtime.spawn import Ranks
from shardwise.trace.stretches import parts_of_ranks
from shardwise.training.profile import Measured, measure_rank
from shardwise.training.recipes import get_recipe
from shardwise.training.setup import Job

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
MOST_OFF, MOST_COST = 0.01, 0.01


def measured_under(plan: str, folder: Path) -> Measured:
    recipe = get_recipe("bytes").changed({"data.limit_bytes": 1_000_000}, source="here")
    job = Job(recipe=recipe, plan=Plan.parse(plan), folder=folder, command="")
    with Ranks(job.plan.num_ranks) as ranks:
        found: Measured = ranks.run(measure_rank, job, NUM_STEPS)[0]
    return found


def main() -> int:
    off, cost = {}, {}
    with tempfile.TemporaryDirectory() as name:
        for plan in PLANS:
            found = measured_under(plan, Path(name) / plan)
            step = found.trace.makespan
            off[plan] = max(abs(sum(parts.values()) / step - 1) for parts in parts_of_ranks(found.trace))
            cost[plan] = min(found.traced_seconds) / min(found.step_seconds) - 1
            print(f"{plan:52} parts off by {off[plan]:.1e} of the step, a trace costs {cost[plan]:+.2%}")
    record("attribution", {"parts_off": off, "tracing_cost": cost})
    return 0 if max(off.values()) <= MOST_OFF and sorted(cost.values())[len(cost) // 2] <= MOST_COST else 1


if __name__ == "__main__":
    sys.exit(main())
