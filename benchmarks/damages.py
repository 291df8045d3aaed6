"""2,100 damages done to a checkpoint: does anything load that is not what was saved?

A transformer of 2 M parameters is trained for some steps on two processes under one plan and saved; its largest boxes
have two blocks. Then it is damaged in 16 ways, at random places. After each damage it is read whole by one process, and
by two as if they went on under another plan, of which there are three. Damage that no process notices is unseen; an
error that is no sentence is counted too.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from record import record

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.testing.damages import KINDS, DamagedFolder
from shardwise.training.checkpoint.index import folder_of
from shardwise.training.checkpoint.parts import Held
from shardwise.training.checkpoint.read import Reader, load_random, look_through
from shardwise.training.folder import CHECKPOINTS
from shardwise.training.job import Job
from shardwise.training.recipe import Recipe, get_recipe
from shardwise.training.run import train_rank
from shardwise.training.setup import make_ready
from shardwise.training.world import World

#: Under each plan.
NUM_DAMAGES = 700
SAVED_UNDER = "dp=2"
READ_UNDER = ("tp=2", "pp=2,microbatches=2", "dp=2,zero=3")
STEPS = (2, 4)


def recipe() -> Recipe:
    changes = {
        "steps": STEPS[1], "checkpoint.every": STEPS[0], "evaluation.every": 0, "evaluation.sample": 0,
        "model.width": 384, "model.layers": 2, "model.heads": 6, "data.limit_bytes": 100_000,
        "optimizer.schedule": "constant",
    }  # fmt: skip
    return get_recipe("tiny").changed(changes, source="here")


def job_under(plan: str, folder: Path) -> Job:
    return Job(recipe=recipe(), plan=Plan.parse(plan), folder=folder, command="")


def whole(folder: Path) -> None:
    with Reader(folder) as reader:
        reader.verify()


def parts(folder: Path, held: Held, world: World) -> None:
    """All that this rank reads to go on, and nothing that waits for the other."""
    with Reader(folder) as reader:
        look_through(reader, held)
        load_random(reader, world)


def noticed(read: Any, *given: Any) -> str:
    """What became of reading: nothing, a sentence, or an error that is none."""
    try:
        read(*given)
    except ShardwiseError:
        return "seen"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "unseen"


def told_of(outcomes: list[str]) -> str:
    """Of all processes: a damage is seen if one of them has seen it."""
    others = [each for each in outcomes if each not in ("seen", "unseen")]
    return others[0] if others else "seen" if "seen" in outcomes else "unseen"


def try_damages(job: Job, seed: int) -> dict[str, Counter[str]]:
    """On every rank alike; the first one does the damage. What was noticed, by kind, whole and under this plan."""
    world = World()
    setup = make_ready(job, world)
    root = job.folder / CHECKPOINTS
    folder, chance = folder_of(root, STEPS[1]), Random(seed)
    damaged = DamagedFolder(folder, folder_of(root, STEPS[0])) if world.is_first else None
    found: dict[str, Counter[str]] = {}
    names = list(KINDS)
    for number in range(NUM_DAMAGES):
        kind = names[number % len(names)]
        if damaged is not None:
            damaged.damage(kind, chance)
        world.wait()
        under_plan = told_of(world.gather(noticed(parts, folder, setup.held, world)))
        found.setdefault(f"{kind}, under the plan", Counter())[under_plan] += 1
        if world.is_first:
            found.setdefault(f"{kind}, whole", Counter())[noticed(whole, folder)] += 1
        world.wait()
        if damaged is not None:
            damaged.restore()
    world.wait()
    assert told_of(world.gather(noticed(parts, folder, setup.held, world))) == "unseen", "it is whole again"
    setup.engine.close()
    world.close()
    return found


def main() -> int:
    results: dict[str, object] = {}
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, Ranks(2) as ranks:
        ranks.run(train_rank, job_under(SAVED_UNDER, Path(name)))
        files = folder_of(Path(name) / CHECKPOINTS, STEPS[1]).iterdir()
        results["checkpoint_bytes"] = sum(path.stat().st_size for path in files)
        for seed, plan in enumerate(READ_UNDER):
            found = ranks.run(try_damages, job_under(plan, Path(name)), seed)[0]
            results[f"{SAVED_UNDER} read under {plan}"] = {kind: dict(counts) for kind, counts in found.items()}
            for counts in found.values():
                total.update(counts)
            print(plan, dict(sum(found.values(), Counter())))
    results |= {
        "damages": NUM_DAMAGES * len(READ_UNDER),
        "reads": total.total(),
        "seen": total["seen"],
        "unseen": total["unseen"],
    }
    record("damages", results)
    return 0 if total["seen"] == total.total() else 1


if __name__ == "__main__":
    sys.exit(main())
