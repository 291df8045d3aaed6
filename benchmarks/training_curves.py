"""The same losses under four plans: 50 steps of the recipe `bytes` in fp32, each plan on four processes."""

import sys
import tempfile
from pathlib import Path

from record import record

from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.trace.metrics import read_metrics
from shardwise.training.job import Job
from shardwise.training.recipe import get_recipe
from shardwise.training.run import train_rank

PLANS = (
    "dp=4,zero=1",
    "tp=2,dp=2",
    "pp=4,schedule=zb-v,microbatches=8",
    "cp=2,pp=2,microbatches=4",
)
NUM_STEPS = 50
LIMIT = 1e-4


def losses(ranks: Ranks, plan: str, folder: Path) -> list[float]:
    recipe = get_recipe("bytes").changed(
        {"steps": NUM_STEPS, "checkpoint.every": 0, "evaluation.every": 0, "evaluation.sample": 0}, source="here"
    )
    ranks.run(train_rank, Job(recipe=recipe, plan=Plan.parse(plan), folder=folder, command="benchmark"))
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, Ranks(4) as ranks:
        curves = {plan: losses(ranks, plan, Path(folder) / str(number)) for number, plan in enumerate(PLANS)}
    first = curves[PLANS[0]]
    worst = {
        plan: max(abs(here - there) / there for here, there in zip(curve, first, strict=True))
        for plan, curve in curves.items()
    }
    for plan, value in worst.items():
        print(f"{plan:40} {curves[plan][0]:.4f} -> {curves[plan][-1]:.4f}   furthest from the first plan {value:.1e}")
    record(
        "training_curves",
        {"limit": LIMIT, "furthest": worst, "losses": {plan: curves[plan] for plan in PLANS}},
    )
    return 0 if max(worst.values()) <= LIMIT and all(len(curve) == NUM_STEPS for curve in curves.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
