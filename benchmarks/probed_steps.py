"""Steps predicted with a probed cluster against steps measured: ten plans over two processes of this machine.

    python benchmarks/probed_steps.py [--rounds 7]

In every round the machine is probed, and then a few steps of every plan are measured. A virtual machine may be a
third slower for minutes when its host is busy, and then a probe finds it so, and a step does: of all rounds the median
of the predictions counts, and the median of the steps.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from record import record

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.probed import cluster_of
from shardwise.planner.account import account
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question
from shardwise.probing.measure import SUBJECTS, probe
from shardwise.probing.steady import settled
from shardwise.training.choose import asked_of, software_for
from shardwise.training.job import Job
from shardwise.training.profile import measure
from shardwise.training.recipe import Recipe, get_recipe

PLANS = (
    "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,microbatches=2", "tp=2", "tp=2,microbatches=2",
    "pp=2,microbatches=4", "pp=2,microbatches=8", "pp=2,microbatches=4,schedule=zb-h1",
)  # fmt: skip
STEPS = 8
MOST = 0.10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    recipe = get_recipe("bytes").changed({"precision": "fp32", "batch": "16"})
    seen: dict[str, list[dict[str, Any]]] = {text: [] for text in PLANS}
    for number in range(rounds):
        found = probe(SUBJECTS, 2, "none")
        assert found is not None, "under torchrun the first rank tells"
        cluster = cluster_of(found)
        for text in PLANS:
            seen[text].append(one(recipe, cluster, text))
            print(number + 1, text, seen[text][-1], flush=True)
    rows = []
    for text, each in seen.items():
        predicted, measured = (median([row[name] for row in each]) for name in ("predicted", "measured"))
        rows.append({
            "plan": text, "predicted": predicted, "measured": measured, "error": predicted / measured - 1,
            "rounds": each,
        })  # fmt: skip
        print(f"{text:36} {predicted:.4f} s predicted, {measured:.4f} s measured: {rows[-1]['error']:+.1%}")
    largest = max(abs(float(row["error"])) for row in rows)
    print(f"largest error {largest:.1%}, at most {MOST:.0%}: {'holds' if largest <= MOST else 'DOES NOT HOLD'}")
    kernels = [asdict(each) for each in cluster.pools[0].device.kernels]
    record("probed_steps", {"rounds": rounds, "plans": rows, "kernels of the last probe": kernels})
    return 0


def one(recipe: Recipe, cluster: Cluster, text: str) -> dict[str, Any]:
    """Seconds of a step under a plan, predicted and measured, and the parts of the prediction."""
    plan = Plan.parse(text)
    software = software_for(recipe, cluster.pools[0].device)
    priced = account(make_question(**asked_of(recipe), cluster=cluster, software=software), plan)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(recipe=recipe, plan=plan, folder=Path(folder) / "run", command="benchmark")
        told = measure(job, 2, STEPS, gpus="none")
    assert told is not None, "of local ranks the first tells"
    return {
        "predicted": priced.seconds,
        "measured": settled(told.step_seconds).seconds,
        "parts": {name: round(float(part), 4) for name, part in priced.parts.items() if part},
    }


if __name__ == "__main__":
    sys.exit(main())
