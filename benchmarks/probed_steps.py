"""Steps predicted with a probed cluster against steps measured: ten plans over two processes of this machine.

    python benchmarks/probed_steps.py [cluster.toml]

Without a file the machine is probed first. Of the steps of a profile the lower quartile counts, as of a probe: what
else runs on the machine makes a time longer, never shorter.
"""

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from record import record

from shardwise.cluster.file import load
from shardwise.cluster.probed import cluster_of
from shardwise.planner.account import account
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question
from shardwise.probing.measure import SUBJECTS, probe
from shardwise.probing.steady import settled
from shardwise.training.choose import asked_of, software_for
from shardwise.training.job import Job
from shardwise.training.profile import measure
from shardwise.training.recipe import get_recipe

PLANS = (
    "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,microbatches=2", "tp=2", "tp=2,microbatches=2",
    "pp=2,microbatches=4", "pp=2,microbatches=8", "pp=2,microbatches=4,schedule=zb-h1",
)  # fmt: skip
STEPS = 8


def main() -> int:
    cluster = load(Path(sys.argv[1])) if len(sys.argv) > 1 else None
    if cluster is None:
        found = probe(SUBJECTS, 2, "none")
        assert found is not None, "under torchrun the first rank tells"
        cluster = cluster_of(found)
    recipe = get_recipe("bytes").changed({"precision": "fp32", "batch": "16"})
    rows = []
    for text in PLANS:
        plan = Plan.parse(text)
        software = software_for(recipe, cluster.pools[0].device)
        question = make_question(**asked_of(recipe), cluster=cluster, software=software)
        priced = account(question, plan)
        predicted = priced.seconds
        with tempfile.TemporaryDirectory() as folder:
            job = Job(recipe=recipe, plan=plan, folder=Path(folder) / "run", command="benchmark")
            told = measure(job, 2, STEPS, gpus="none")
        assert told is not None, "of local ranks the first tells"
        seconds = settled(told.step_seconds).seconds
        parts = {name: round(float(part), 4) for name, part in priced.parts.items() if part}
        error = predicted / seconds - 1
        rows.append({"plan": text, "predicted": predicted, "measured": seconds, "error": error, "parts": parts})
        print(rows[-1], flush=True)
    print("largest error", max(abs(float(row["error"])) for row in rows))
    kernels = [asdict(each) for each in cluster.pools[0].device.kernels]
    record("probed_steps", {"plans": rows, "kernels": kernels})
    return 0


if __name__ == "__main__":
    sys.exit(main())
