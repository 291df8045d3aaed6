"""Steps predicted with a probed cluster against steps measured: ten plans over two processes of this machine.

    python benchmarks/probed_steps.py [--rounds 6]

In every round the machine is probed, and then a few steps of every plan are measured. A core of a virtual machine may
be 1.5 times slower for seconds or minutes when its host is busy: in one round the probe has met such a time, in the
next one the steps have. So after each step all ranks run a pass of a small model, which the probe's kernels price too:
how much longer it takes than that is how much slower the machine is than when it was probed. Predictions are told as
they are, and for the speed that the machine had.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from record import record

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.probed import cluster_of
from shardwise.planner.account import account
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question
from shardwise.probing.measure import SUBJECTS, probe
from shardwise.probing.steady import settled
from shardwise.probing.whole_steps import Size, pass_seconds, small_model, timed_pass
from shardwise.ranks.spawn import Ranks
from shardwise.training.choose import asked_of, software_for
from shardwise.training.folder import make_folder
from shardwise.training.job import Job
from shardwise.training.recipe import Recipe, get_recipe
from shardwise.training.setup import make_ready, on_device
from shardwise.training.world import World

PLANS = (
    "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,microbatches=2", "tp=2", "tp=2,microbatches=2",
    "pp=2,microbatches=4", "pp=2,microbatches=8", "pp=2,microbatches=4,schedule=zb-h1",
)  # fmt: skip
WARM_UP, STEPS = 3, 8
REFERENCE = Size(128, 8)
MOST = 0.10


class Told(NamedTuple):
    """Seconds of steps, and of the reference's passes between them."""

    steps: list[float]
    passes: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
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
        predicted, slower, measured = (
            median([row[name] for row in each]) for name in ("predicted", "slower", "measured")
        )
        at_speed = median([row["predicted"] * row["slower"] / row["measured"] for row in each]) - 1
        rows.append({
            "plan": text, "predicted": predicted, "measured": measured, "slower than when probed": slower,
            "error": predicted / measured - 1, "error at the speed of the machine": at_speed, "rounds": each,
        })  # fmt: skip
        print(
            f"{text:36} {predicted:.4f} s predicted, {measured:.4f} s measured: {predicted / measured - 1:+.1%};"
            f" {slower:.2f} times slower than when probed: {at_speed:+.1%}"
        )
    for name in ("error", "error at the speed of the machine"):
        largest = max(abs(float(row[name])) for row in rows)
        print(f"{name}: largest {largest:.1%}, at most {MOST:.0%}: {'holds' if largest <= MOST else 'DOES NOT HOLD'}")
    kernels = [asdict(each) for each in cluster.pools[0].device.kernels]
    record("probed_steps", {"rounds": rounds, "plans": rows, "kernels of the last probe": kernels})
    return 0


def one(recipe: Recipe, cluster: Cluster, text: str) -> dict[str, Any]:
    """Seconds of a step under a plan, predicted and measured, and the parts of the prediction."""
    plan, device = Plan.parse(text), cluster.pools[0].device
    priced = account(make_question(**asked_of(recipe), cluster=cluster, software=software_for(recipe, device)), plan)
    with tempfile.TemporaryDirectory() as folder, Ranks(2, gpus="none") as ranks:
        job = Job(recipe=recipe, plan=plan, folder=Path(folder) / "run", command="benchmark")
        told: Told = ranks.run(on_rank, job)[0]
    return {
        "predicted": priced.seconds,
        "measured": settled(told.steps).seconds,
        "slower": settled(told.passes).seconds / pass_seconds(REFERENCE, device.kernels).total,
        "parts": {name: round(float(part), 4) for name, part in priced.parts.items() if part},
    }


def on_rank(job: Job) -> Told:
    """Time steps of a job, and a pass of the reference after each. A step ends with its slowest rank, and so a pass."""
    steps, passes = list[float](), list[float]()
    world = World()
    with world.telling():
        if world.is_first:
            make_folder(job.folder)
        world.wait()
        setup = make_ready(job, world)
        model, tokens = small_model(*REFERENCE)
        with setup.engine:
            for number in range(WARM_UP + STEPS):
                batch = on_device(setup.batches.at(number), world)
                world.wait()
                start = perf_counter()
                setup.engine.train_step(batch)
                steps.append(world.highest(perf_counter() - start))
                model.zero_grad(set_to_none=False)
                world.wait()
                passes.append(world.highest(timed_pass(model, tokens).total))
        world.wait()
        world.close()
    return Told(steps[WARM_UP:], passes[WARM_UP:])


if __name__ == "__main__":
    sys.exit(main())
